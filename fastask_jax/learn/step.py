"""The train step: one packed batch -> one update of the weights.

Host side, the batch is cut into micro-batches.  Then one jitted, donated function over the mesh
computes the global denominators, accumulates gradients in float32 over the micro-batches that
hold tokens, clips by the global norm and applies AdamW.  Weights are float32 whatever type the
model computes in; each optimizer moment lies where its weight does.

With LoRA the state's parameters are the adapters alone, optimizer state included.  The frozen
weights belong to the step: they are an argument of the program that no update returns.

Left out: which batches to train on and when (the loop), and how a loss is made (`objective.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from fastask_jax.learn.metrics import Metric, Metrics, Sum, empty_like, merge
from fastask_jax.learn.objective import Objective, objective_sum, reduction_weights
from fastask_jax.learn.packing import Batch, Packed, check_ids, micro_batches
from fastask_jax.learn.score import Params, ScoreFn, score_fn
from fastask_jax.model.config import ModelConfig
from fastask_jax.model.lora import LoraConfig, adapter_specs, attach
from fastask_jax.model.mesh import make_mesh, put, row_spec
from fastask_jax.model.parameters import is_matrix
from fastask_jax.model.sharding import check_rows, param_shardings
from fastask_jax.model.sharding import param_specs as specs_of


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "learning_rate", "warmup_steps", "decay_steps", "final_rate", "weight_decay",
        "max_grad_norm",
    ],
    meta_fields=["b1", "b2", "eps", "first_moment"],
)
@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and, if asked for, a linear decay; and global-norm clipping.

    learning_rate: behind the warm-up.  warmup_steps: updates over which it rises from 0.
    decay_steps: updates after which the learning rate has fallen, from its full height behind the
    warm-up, to the share `final_rate` of it, where it stays; 0 keeps it constant.
    final_rate: share of the learning rate that is left after the decay.
    weight_decay: of matrices, by AdamW.  max_grad_norm: global norm that gradients are clipped to.
    b1, b2, eps: Adam's.
    All numbers but b1, b2 and eps are array leaves: changing them compiles nothing anew.  Weight
    decay leaves out vectors and scalars (norms, biases, decays).
    first_moment: float32 or bfloat16, the type in which the running mean of gradients is kept.
    """

    learning_rate: float = 3e-4
    warmup_steps: float = 0.0
    decay_steps: float = 0.0
    final_rate: float = 0.1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    first_moment: str = "float32"

    def __post_init__(self) -> None:
        if self.first_moment not in ("float32", "bfloat16"):
            raise ValueError(
                f"optimizer first_moment must be float32 or bfloat16, not {self.first_moment!r}"
            )
        # Leaves are tracers inside a jitted function; only numbers can be checked.
        for name in (
            "learning_rate", "warmup_steps", "decay_steps", "final_rate", "weight_decay",
            "max_grad_norm",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                continue
            if not value >= 0 or (name == "max_grad_norm" and value == 0):
                raise ValueError(f"optimizer {name} must be positive, not {value}")
            if math.isinf(value) and name != "max_grad_norm":
                raise ValueError(f"optimizer {name} must be finite, not {value}")
            object.__setattr__(self, name, float(value))
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"optimizer {name} must be at least 0 and below 1, not {getattr(self, name)}"
                )
        if not 0 < self.eps < math.inf:
            raise ValueError(f"optimizer eps must be above 0 and finite, not {self.eps}")
        warmup, decay, final = self.warmup_steps, self.decay_steps, self.final_rate
        if isinstance(final, float) and final > 1:
            raise ValueError(f"optimizer final_rate is a share, at most 1, not {final}")
        if isinstance(decay, float) and isinstance(warmup, float) and 0 < decay < warmup:
            raise ValueError(
                f"optimizer decay_steps ({decay:g}) must be 0 or at least warmup_steps "
                f"({warmup:g}), behind which the rate falls"
            )

    def rate(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Learning rate of the update that follows `step` updates."""
        rising = jnp.minimum(1.0, (step + 1) / jnp.maximum(self.warmup_steps, 1))
        span = jnp.maximum(self.decay_steps - self.warmup_steps, 1)
        passed = jnp.clip((step + 1 - self.warmup_steps) / span, 0.0, 1.0)
        falling = 1.0 - (1.0 - self.final_rate) * passed
        return self.learning_rate * rising * jnp.where(self.decay_steps > 0, falling, 1.0)

    def transformation(self, step: Int[Array, ""] | int = 0) -> optax.GradientTransformation:
        """Clip and AdamW as an optax transformation for the update after `step` updates."""
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.scale_by_adam(
                b1=self.b1, b2=self.b2, eps=self.eps, mu_dtype=self.first_moment
            ),
            optax.add_decayed_weights(
                self.weight_decay, mask=partial(jax.tree_util.tree_map_with_path, is_matrix)
            ),
            optax.scale_by_learning_rate(self.rate(jnp.asarray(step))),
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt_state", "step", "version"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """What training changes: weights (with LoRA, adapters), optimizer state, updates done (int32),
    policy version (int32; the number that sampled tokens record)."""

    params: Params
    opt_state: Any
    step: Int[Array, ""]
    version: Int[Array, ""]


@dataclass
class TrainStep:
    """step(state, packed) -> (state, metrics).  Made by `make_train_step`.

    The given state is donated: its arrays are gone afterwards, so whoever else holds them (a
    rollout engine) must take the new ones.  Metrics are typed (`metrics.results` turns them into
    floats) and stay on the device until asked for.
    """

    scores: ScoreFn
    objective: Objective
    optimizer: OptimizerConfig
    micro_batch_rows: int
    mesh: Mesh
    param_specs: Any  # the parameters' tree, or the upper part of it, with PartitionSpecs
    lora: LoraConfig | None = None
    frozen: Any = None  # with LoRA, the weights that the adapters stand on
    model: ModelConfig | None = None  # None for a ScoreFn
    traces: int = 0  # how often the update was traced, hence compiled
    _jitted: Any = field(default=None, repr=False)

    def policy(self, state: TrainState) -> Params:
        """The weights that act, for the engine or the scorer; shares the state's arrays."""
        return self._joined(state.params, self.frozen)

    def _joined(self, params: Params, frozen: Params) -> Params:
        return params if self.lora is None else attach(self.lora, frozen, params)

    def init(self, params: Params) -> TrainState:
        """A fresh state on the mesh.  `params` are copied, so the caller may keep them; every
        process gives the same ones, or ones that are on the mesh already."""
        shardings = self.shardings(self._shapes(params))
        copied = put(params, shardings.params)
        return jax.jit(self._fresh, out_shardings=shardings, donate_argnums=0)(copied)

    def _fresh(self, params: Params) -> TrainState:
        return TrainState(
            params=params,
            opt_state=self.optimizer.transformation().init(params),
            step=jnp.zeros((), jnp.int32),
            version=jnp.zeros((), jnp.int32),
        )

    def _shapes(self, params: Params) -> TrainState:
        return jax.eval_shape(self._fresh, params)

    def shardings(self, state: TrainState) -> TrainState:
        """The state with the `NamedSharding` of each leaf: those of the parameters are given,
        optimizer state that looks like the parameters follows them, and the rest is copied."""
        copied = NamedSharding(self.mesh, PartitionSpec())
        params = self._param_shardings(state.params)
        structure: Any = jax.tree.structure(state.params)

        def follows(tree: Any) -> bool:
            return jax.tree.structure(tree) == structure

        opt_state = jax.tree.map(
            lambda part: params if follows(part) else copied, state.opt_state, is_leaf=follows
        )
        scalar: Any = copied
        return TrainState(params=params, opt_state=opt_state, step=scalar, version=scalar)

    def _param_shardings(self, params: Params) -> Any:
        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(self.mesh, spec), part),
            self.param_specs,
            params,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def place(self, state: TrainState) -> TrainState:
        """The state with every leaf where the mesh wants it (a no-op once it is there)."""
        return jax.device_put(state, self.shardings(state))

    def abstract(self, params: Params) -> TrainState:
        """Shapes, dtypes and shardings of the state for these (possibly abstract) params; what
        `Checkpointer.restore` needs.  Allocates nothing."""
        shapes = self._shapes(params)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings(shapes),
        )

    def __call__(
        self,
        state: TrainState,
        batch: Batch | Packed,
        *,
        objective: Objective | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> tuple[TrainState, Metrics]:
        """One update.  `objective` and `optimizer` replace those of the step for this call;
        changing only their numbers compiles nothing anew.

        A gradient or an update that isn't finite changes no weight and no optimizer state, and
        neither does a batch without a sampled token; the metric optim/skipped is then 1 (`step`
        and `version` still advance).

        Raises ValueError for token or expert ids that the model doesn't have.
        """
        flat = batch.batch if isinstance(batch, Packed) else batch
        if self.model is not None:
            check_ids(flat, self.model.vocab_size, self.model.num_experts)
        micro = put(micro_batches(flat, self.micro_batch_rows), self._micro_sharding)
        objective = objective or self.objective
        return self._compiled(state)(
            self.place(state), self.frozen, micro, objective, optimizer or self.optimizer,
            terms=objective.terms,
        )  # fmt: skip

    def lower(self, state: TrainState, rows: int, length: int) -> jax.stages.Lowered:
        """The update for batches of this shape, not compiled yet; `state` may be abstract."""
        shape = (rows // self.micro_batch_rows, self.micro_batch_rows, length)
        micro = jax.tree.map(
            lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=self._micro_sharding),
            Batch(
                tokens=jnp.int32,
                positions=jnp.int32,
                segment_ids=jnp.int32,
                mask=jnp.bool_,
                behaviour_logprobs=jnp.float32,
                advantages=jnp.float32,
                versions=jnp.int32,
            ),
        )
        return self._compiled(state).lower(
            state, self.frozen, micro, self.objective, self.optimizer, terms=self.objective.terms
        )

    @property
    def _micro_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, row_spec(leading=1))

    def _compiled(self, state: TrainState) -> Any:
        if self._jitted is None:
            # Metrics are copied to every device, so that every process can read them.
            copied = NamedSharding(self.mesh, PartitionSpec())
            self._jitted = jax.jit(
                self._update,
                static_argnames="terms",
                donate_argnames="state",
                out_shardings=(self.shardings(state), copied),
            )
        return self._jitted

    def gradient(
        self,
        params: Params,
        version: Array,
        micro: Batch,
        objective: Objective,
        terms: frozenset,
        frozen: Params | None = None,
    ) -> tuple[Params, Metrics]:
        """Gradient of the whole batch's objective, [micro-batches, rows, length] -> like params."""
        _, denominators = reduction_weights(objective, micro.mask, micro.segment_ids)
        denominator = jnp.maximum(jnp.sum(denominators), 1e-9)

        def part(params: Params, batch: Batch) -> tuple[Array, Metrics]:
            scores = self.scores(
                self._joined(params, frozen),
                batch.tokens,
                batch.positions,
                batch.segment_ids,
                batch.mask,
                objective.temperature,
                *(() if batch.expert_ids is None else (batch.expert_ids,)),
            )
            total, metrics = objective_sum(
                objective, scores.logprobs, scores.entropy, batch, version, terms
            )
            return total / denominator, metrics | jax.lax.stop_gradient(scores.aux)

        def add(index: Array, carry: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
            rows = jax.tree.map(
                lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False), micro
            )
            grads, metrics = jax.grad(part, has_aux=True)(params, rows)
            return jax.tree.map(jnp.add, carry[0], grads), merge(carry[1], metrics)

        shapes: dict[str, Metric] = jax.eval_shape(
            part, params, jax.tree.map(lambda array: array[0], micro)
        )[1]
        start = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        if self.mesh.size > 1:
            start = jax.lax.with_sharding_constraint(start, self._param_shardings(params))
        # A loop with a run-time bound: micro-batches that exist only to keep the shape static
        # cost nothing.  Nothing differentiates through the loop itself.
        used = jnp.any(micro.segment_ids > 0, axis=(1, 2))
        count = jnp.max(jnp.where(used, jnp.arange(used.shape[0]) + 1, 0))
        return jax.lax.fori_loop(0, count, add, (start, empty_like(shapes)))

    def _update(
        self,
        state: TrainState,
        frozen: Params,
        micro: Batch,
        objective: Objective,
        optimizer: OptimizerConfig,
        terms: frozenset,
    ) -> tuple[TrainState, Metrics]:
        self.traces += 1
        grads, metrics = self.gradient(
            state.params, state.version, micro, objective, terms, frozen
        )
        norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.transformation(state.step).update(
            grads, state.opt_state, state.params
        )
        update_norm = optax.tree.norm(updates)
        usable = jnp.isfinite(norm) & jnp.isfinite(update_norm) & jnp.any(micro.mask)
        params = optax.apply_updates(state.params, updates)
        keep = partial(jax.tree.map, lambda new, old: jnp.where(usable, new, old))
        one = jnp.ones(())
        metrics |= {
            "optim/grad_norm": Sum(norm, one),
            "optim/update_norm": Sum(update_norm, one),
            "optim/learning_rate": Sum(optimizer.rate(state.step), one),
            "optim/skipped": Sum(1.0 - usable, one),
        }
        new = TrainState(
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + 1,
            version=state.version + 1,
        )
        return new, metrics


def make_train_step(
    model: Any,
    objective: Objective,
    optimizer: OptimizerConfig,
    *,
    micro_batch_rows: int = 8,
    mesh: Mesh | None = None,
    param_specs: Any = None,
    lora: LoraConfig | None = None,
    frozen: Params | None = None,
) -> TrainStep:
    """The train step of a ModelConfig (or of a ScoreFn, for other models).

    micro_batch_rows: rows per accumulation step; the batch must be packed with the same number.
    mesh: defaults to one device.
    param_specs: for a ScoreFn, whose parameters have no logical axes: how they are partitioned, a
        tree of PartitionSpecs like them or one for all (`PartitionSpec()` copies them).
    lora: trains adapters on the weights `frozen` instead of all weights; rank 0 is none.  The
        weights stay in their type and, where they lie on the mesh already, in their memory; shapes
        with shardings will do for `lower`.

    Raises ValueError when the rows don't divide over the mesh, when a parameter doesn't, when a
    ScoreFn comes without `param_specs` on a mesh of several devices, or when one of `lora` and
    `frozen` comes without the other.
    """
    mesh = mesh or make_mesh()
    check_rows(micro_batch_rows, mesh)
    lora = lora if lora is not None and lora.rank else None
    if (lora is None) != (frozen is None):
        raise ValueError("lora (of rank 1 or more) and the frozen weights come together")
    if not callable(model):
        if param_specs is not None:
            raise ValueError("param_specs is for a ScoreFn; a ModelConfig's logical axes decide")
        if lora is None:
            param_specs = specs_of(model, mesh)
        else:
            param_specs = adapter_specs(model, lora, mesh)
            frozen = jax.tree.map(_placed, frozen, param_shardings(model, mesh))
    elif lora is not None:
        raise ValueError("lora is for a ModelConfig; a ScoreFn's linear maps aren't known")
    elif param_specs is None:
        if mesh.size > 1:
            raise ValueError(
                "a ScoreFn on several devices needs param_specs: PartitionSpecs like its "
                "parameters, or PartitionSpec() to copy them"
            )
        param_specs = PartitionSpec()
    return TrainStep(
        score_fn(model, mesh), objective, optimizer, micro_batch_rows, mesh, param_specs, lora,
        frozen, None if callable(model) else model,
    )  # fmt: skip


def _placed(leaf: Any, sharding: NamedSharding) -> Any:
    """The array (or shape) where the mesh wants it, without a copy if it is there."""
    there = getattr(leaf, "sharding", None)
    if there is not None and there.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return put(leaf, sharding)
