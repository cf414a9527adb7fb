"""Adapters alone, in the files of Hugging Face's PEFT.

    save_adapter("adapter", cfg, lora, adapters, base="Qwen/Qwen3.5-35B-A3B")
    # torch: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "adapter")

Left out: reading them, and adapters that PEFT can't load (`check_peft`): those leave by
`merge_adapters` and `save_params`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from fastask_jax.model.config import DENSE, MOE, ModelConfig
from fastask_jax.model.decoder import Params
from fastask_jax.model.directories import replaced_directory
from fastask_jax.model.lora import FEED_FORWARD, ROUTED_EXPERTS, LoraConfig
from fastask_jax.model.safetensors_files import Planned, write_safetensors
from fastask_jax.model.tensors import tensor_table

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# How PEFT names the modules of a model that it wraps.
_WRAPPED = "base_model.model."


def check_peft(cfg: ModelConfig, lora: LoraConfig) -> None:
    """Raises ValueError for adapters that PEFT has no form for.

    Routed experts are no linear maps there; and where dense and routed layers mix, it takes the
    names of the dense ones for those of experts.
    """
    refused = [target for target in lora.targets if target in ROUTED_EXPERTS]
    if {DENSE, MOE} <= set(cfg.feed_forwards):
        refused += [target for target in lora.targets if target in FEED_FORWARD]
    if refused and cfg.num_moe_layers:
        raise ValueError(
            f"PEFT can't load adapters on {', '.join(refused)} of this model: merge them into the "
            "weights (merge_adapters, then save_params), or leave them out of lora.targets"
        )


def save_adapter(
    directory: str | Path, cfg: ModelConfig, lora: LoraConfig, adapters: Params, base: str = ""
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, float32.

    The directory appears whole, in place of an earlier one, or not at all.  base: the name or the
    folder of the weights that the adapters stand on, for whoever loads them.

    Args:
      adapters: a tree as from `init_adapters`, on this process's devices or the host.

    Raises:
      ValueError: as `check_peft` does.
    """
    check_peft(cfg, lora)
    tensors = dict(_tensors(cfg, jax.device_get(adapters)))
    modules = {name.rpartition(".lora_")[0] for name in tensors}
    # The part behind "layers.N.", which is the same in every layer.
    targets = sorted({module.split(".layers.", 1)[1].partition(".")[2] for module in modules})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": targets,
    }
    plan = [Planned(name, array.dtype, array.shape) for name, array in tensors.items()]
    with replaced_directory(directory, (CONFIG_FILE, WEIGHTS_FILE)) as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        write_safetensors(folder, plan, tensors.values(), file=WEIGHTS_FILE)


def _tensors(cfg: ModelConfig, adapters: Params) -> Iterator[tuple[str, np.ndarray]]:
    """A `[R, inputs]` and B `[outputs, R]` of every adapted map, by their names in PEFT."""
    flat = nnx.traversals.flatten_mapping(adapters)
    for tensor in tensor_table(cfg):
        if (*tensor.path, "a") not in flat:
            continue
        a, b = (np.asarray(flat[*tensor.path, part][tensor.block]) for part in "ab")
        module = _WRAPPED + tensor.name.removesuffix(".weight")
        rank = a.shape[-1]
        yield f"{module}.lora_A.weight", np.ascontiguousarray(a.reshape(-1, rank).T)
        yield f"{module}.lora_B.weight", np.ascontiguousarray(b.reshape(rank, -1).T)
