"""The learner: advantages, losses, packing and the train step.

`checkpoint` is not re-exported: it brings in Orbax, which callers that only score or train for a
moment don't need.
"""

from fastask_jax.learn.advantages import advantages, has_signal
from fastask_jax.learn.losses import LOSSES, Context, LossConfig
from fastask_jax.learn.metrics import results
from fastask_jax.learn.objective import Keep, Objective
from fastask_jax.learn.packing import Batch, PackConfig, Packed, Trainable, TrainableTokens, pack
from fastask_jax.learn.score import Scorer, make_scorer
from fastask_jax.learn.step import OptimizerConfig, TrainState, TrainStep, make_train_step

__all__ = [
    "LOSSES",
    "Batch",
    "Context",
    "Keep",
    "LossConfig",
    "Objective",
    "OptimizerConfig",
    "PackConfig",
    "Packed",
    "Scorer",
    "TrainState",
    "TrainStep",
    "Trainable",
    "TrainableTokens",
    "advantages",
    "has_signal",
    "make_scorer",
    "make_train_step",
    "pack",
    "results",
]
