"""Memory that loading weights takes beyond the weights themselves.

`python -m experiments.bench.load --gigabytes 4`: writes a synthetic Llama checkpoint in shards,
and in a fresh process loads it onto eight CPU devices (`fsdp` 4, `tensor` 2).  `value` is the
peak of anonymous memory above the level before loading, less the weights, in units of the
largest tensor.  `resident` counts the same for everything that is resident: pages of the
checkpoint's own files too, which the system takes back whenever it wants them.  Leaves out
devices with memory of their own, where stages bound what the host holds.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.bench.report import report
from experiments.config import option, parse, run_main

DTYPES = ("float32", "bfloat16")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Config:
    gigabytes: float = option(4.0, "size of the checkpoint, about")
    width: int = option(2048, "hidden size; sets the size of the largest tensor")
    dtype: str = option("float32", "type of the checkpoint: float32 or bfloat16")
    param_dtype: str = option("float32", "type of the loaded weights: float32 or bfloat16")
    max_shard_bytes: int = option(1_000_000_000, "size of the checkpoint's files, at most")
    runs: int = option(1, "measured loads, each in a process of its own")
    directory: Path | None = option(None, "where the checkpoint goes; none takes a temporary one")

    def __post_init__(self) -> None:
        if self.gigabytes <= 0 or self.runs < 1 or self.max_shard_bytes < 1:
            raise ValueError("gigabytes, runs and max_shard_bytes must be above 0")
        if self.width < 128 or self.width % 128:
            raise ValueError(f"width must be a multiple of 128, not {self.width}")
        if not {self.dtype, self.param_dtype} <= set(DTYPES):
            raise ValueError(f"dtype and param_dtype are one of {', '.join(DTYPES)}")


def write_checkpoint(config: Config, directory: Path) -> None:
    """Writes the checkpoint; `expected` says what is in it."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from fastask_jax.model import ModelConfig, init_params, save_params

    width = config.width
    numbers = config.gigabytes * 1e9 / (4 if config.dtype == "float32" else 2)
    cfg = ModelConfig(
        vocab_size=16 * width,
        hidden_size=width,
        # 16 width^2 numbers are in the embedding, 11.25 width^2 in each layer.
        num_layers=max(1, round((numbers / width**2 - 16) / 11.25)),
        mixers=("full_attention",),
        feed_forwards=("dense",),
        heads=width // 64,
        kv_heads=width // 128,
        head_dim=64,
        qk_norm=False,
        attention_gate=False,
        partial_rotary_factor=1.0,
        intermediate_size=11 * width // 4,
        zero_centered_norms=False,
    )
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: init_params(cfg, jax.random.key(0))))
    values = [expected(number, leaf.shape) for number, leaf in enumerate(leaves)]
    params = jax.tree.unflatten(tree, values)
    save_params(directory, cfg, params, config.dtype, config.max_shard_bytes)


def expected(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """The n-th leaf, as a view that takes no memory: entry i of its first axis is n + i, modulo
    128, which every type holds."""
    rows = ((number + np.arange(shape[0])) % 128).astype(np.float32)
    return np.broadcast_to(rows.reshape(-1, *(1,) * (len(shape) - 1)), shape)


def measure(directory: Path, param_dtype: str) -> dict[str, float]:
    """Loads the checkpoint and checks it; bytes and seconds.  For a process of its own."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from fastask_jax.model import load_params, make_mesh

    mesh = make_mesh(fsdp=4, tensor=2)
    with peaks() as above:
        began = time.perf_counter()
        _, params = load_params(directory, mesh=mesh, param_dtype=param_dtype)
        seconds = time.perf_counter() - began
    buffers: dict[int, int] = {}
    for number, leaf in enumerate(jax.tree.leaves(params)):
        whole = expected(number, leaf.shape)
        for shard in leaf.addressable_shards:
            # Replicas may share one buffer.
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
            if not np.array_equal(np.asarray(shard.data), whole[shard.index]):
                raise ValueError(f"leaf {number} isn't what was written")
    weights = sum(buffers.values())
    largest = params["embedding"].nbytes
    return {
        "seconds": seconds,
        "weights_bytes": weights,
        "largest_tensor_bytes": largest,
        "anonymous": (above["anonymous"] - weights) / largest,
        "resident": (above["resident"] - weights) / largest,
    }


@contextmanager
def peaks() -> Iterator[dict[str, int]]:
    """Peaks of memory within the block, in bytes above the level at its beginning: `anonymous`,
    looked at every millisecond, and `resident`, kept by the system.  Linux only."""
    above: dict[str, int] = {}
    done = threading.Event()
    seen = start = _status("RssAnon")
    resident = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew

    def watch() -> None:
        nonlocal seen
        while not done.wait(0.001):
            seen = max(seen, _status("RssAnon"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield above
    finally:
        done.set()
        thread.join()
    above["anonymous"] = max(seen, _status("RssAnon")) - start
    above["resident"] = _status("VmHWM") - resident


def _status(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.M)
    if match is None:
        raise OSError(f"{_STATUS} doesn't tell {name}; this benchmark needs Linux")
    return 1024 * int(match[1])


def run(config: Config) -> list[dict[str, float]]:
    """One measurement for each run; the checkpoint is deleted at the end."""
    directory = Path(tempfile.mkdtemp(prefix="load", dir=config.directory))
    # Fresh processes: what writing left behind in this one's memory must not count.
    context = multiprocessing.get_context("spawn")
    try:
        with context.Pool(1, maxtasksperchild=1) as pool:
            pool.apply(write_checkpoint, (config, directory / "model"))
            return [
                pool.apply(measure, (directory / "model", config.param_dtype))
                for _ in range(config.runs)
            ]
    finally:
        shutil.rmtree(directory)


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, argv, description=__doc__)
    results = run(config)

    def middle(name: str) -> float:
        return float(np.median([result[name] for result in results]))

    report(
        "load",
        "largest tensors beyond the weights",
        [result["anonymous"] for result in results],
        higher_is_better=False,
        resident=max(result["resident"] for result in results),
        seconds=middle("seconds"),
        weights_bytes=int(middle("weights_bytes")),
        largest_tensor_bytes=int(middle("largest_tensor_bytes")),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
    )


if __name__ == "__main__":
    run_main(main)
