"""Non-padding tokens per second of a train step, ours and the best torch step's.

    python -m experiments.bench.train_step --peer transformers

Workload W1 (`w1.py`): a small Llama, 32 sequences, a clipped loss, AdamW, float32, on CPU.  Ours
goes the public way: a model directory, `pack`, `make_train_step`.  The peer (`w1_torch.py`) sits
in a process of its own with as many threads, waits while ours works and the other way round, and
takes its turns in every arrangement; `ratio` is over its best, `ratio_padded` over the best that
pads as TRL does.  A side whose first step hasn't the loss and the gradient norm of W1 gets no
figure.  Left out: compilation and warm-up, and the packing of a batch (milliseconds).

Take it on a quiet machine (`load` is what ran at the start): torch's threads wait for each other
at every operation, so a busy core slows the peer many times more than ours and flatters the ratio.

One difference: W1 decays every parameter, our optimizer leaves out the 3,328 norm weights.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from experiments.bench import w1
from experiments.bench.report import report
from experiments.config import option, parse, run_main

PEERS = ("transformers",)


@dataclass(frozen=True)
class Config:
    peer: str | None = option(None, "what to compare with: transformers, or none")
    runs: int = option(3, "timed steps of each arrangement of the peer, ours before each of them")
    devices: int = option(0, "CPU devices that the rows are split over; 0: one for each core")
    row_length: int = option(3072, "tokens of a packed row")
    device_rows: int = option(1, "rows whose gradient a device takes at a time")
    scan_unroll: int = option(w1.LAYERS, "layers unrolled per scan step")

    def __post_init__(self) -> None:
        if self.peer is not None and self.peer not in PEERS:
            raise ValueError(f"peer must be one of {', '.join(PEERS)}, not {self.peer!r}")
        for name in ("runs", "row_length", "device_rows", "scan_unroll"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
        if self.peer and missing:
            raise ValueError(f"--peer {self.peer} needs {missing[0]}: pip install -e '.[parity]'")


def threads() -> int:
    """What XLA takes by itself, and the peer is given."""
    return len(os.sched_getaffinity(0))


def write_model(directory: Path) -> None:
    """W1's weights as a model directory, for both sides."""
    from safetensors.numpy import save_file

    (directory / "config.json").write_text(json.dumps(w1.hf_config()))
    save_file(w1.weights(), directory / "model.safetensors", metadata={"format": "pt"})


def check(who: str, loss: float, norm: float) -> None:
    """Raises RuntimeError for a first step that isn't W1's."""
    if abs(loss - w1.LOSS) > 2e-6 or abs(norm - w1.GRADIENT_NORM) > 5e-5:
        raise RuntimeError(
            f"{who}: the first step has the loss {loss:.6f} and the gradient norm {norm:.6f}, "
            f"not {w1.LOSS} and {w1.GRADIENT_NORM}: that is other work, so there is no figure"
        )


class OurStep:
    """Steps of a model directory's weights on the packed batch."""

    def __init__(self, directory: Path, config: Config):
        import jax

        devices = config.devices or threads()
        jax.config.update("jax_platforms", "cpu")
        if devices > 1:
            jax.config.update("jax_num_cpu_devices", devices)
        from fastask_jax.learn import (
            LossConfig,
            Objective,
            OptimizerConfig,
            PackConfig,
            TrainableTokens,
            make_train_step,
            pack,
        )
        from fastask_jax.model import load_params, make_mesh

        mesh = make_mesh(data=devices)
        model, params = load_params(directory, mesh, scan_unroll=config.scan_unroll)
        rows = devices * config.device_rows
        self.packed = pack(
            [TrainableTokens(s.ids, s.mask, s.logprobs, s.advantage) for s in w1.batch()],
            PackConfig((config.row_length,), micro_batch_rows=rows, min_rows=1),
        )
        self._step = make_train_step(
            model,
            Objective(loss="aipo_clip", bounds=LossConfig(w1.CLIP, w1.CLIP)),
            OptimizerConfig(
                learning_rate=w1.LEARNING_RATE,
                weight_decay=w1.WEIGHT_DECAY,
                max_grad_norm=w1.MAX_GRAD_NORM,
                b1=w1.BETAS[0],
                b2=w1.BETAS[1],
                eps=w1.EPS,
            ),
            micro_batch_rows=rows,
            mesh=mesh,
        )
        self._state = self._step.init(params)

    def __call__(self) -> tuple[float, float]:
        """One step; its loss, and its gradient's norm before clipping."""
        import jax

        from fastask_jax.learn import results

        self._state, metrics = jax.block_until_ready(self._step(self._state, self.packed))
        values = results(metrics)
        return values["loss/policy"], values["optim/grad_norm"]


def serve_torch(connection: Connection, directory: Path, threads: int) -> None:
    """The peer's process: for each name that comes, a step in that arrangement and its seconds."""
    from experiments.bench import w1_torch

    step = w1_torch.TorchStep(directory, threads)
    for name in w1_torch.ARRANGEMENTS:
        step.restart()
        connection.send((name, *step(name)))
    connection.send((w1_torch.PADDED, w1_torch.SELECTED))
    while (name := connection.recv()) is not None:
        started = time.perf_counter()
        step(name)
        connection.send(time.perf_counter() - started)


@contextmanager
def torch_peer(directory: Path) -> Iterator[tuple[Connection, dict[str, list[float]], Any]]:
    """A connection to a peer that has taken a checked step in each arrangement, an empty list of
    figures for each of them, and which of them pad as TRL does and which score selected tokens."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=serve_torch, args=(other, directory, threads()), daemon=True)
    process.start()
    other.close()
    figures: dict[str, list[float]] = {}
    try:
        while len(message := connection.recv()) == 3:
            check(f"torch, arrangement {message[0]}", *message[1:])
            figures[message[0]] = []
    except EOFError:
        raise RuntimeError("the peer's process died; what it said stands above") from None
    try:
        yield connection, figures, message
    finally:
        connection.send(None)
        process.join()


def measure(config: Config, directory: Path) -> dict[str, Any]:
    """Takes turns, prints each figure and the result line."""
    load = os.getloadavg()[0]
    step = OurStep(directory, config)
    check("ours", *step())
    step()

    def ours() -> float:
        started = time.perf_counter()
        step()
        return w1.TOKENS / (time.perf_counter() - started)

    workload: dict[str, Any] = {
        "load": load,
        "threads": threads(),
        "tokens": w1.TOKENS,
        "model_tokens": w1.MODEL_TOKENS,
        "sequences": w1.SEQUENCES,
        "loss": w1.LOSS,
        "gradient_norm": w1.GRADIENT_NORM,
        "row_length": config.row_length,
        "devices": config.devices or threads(),
        "device_rows": config.device_rows,
        "scan_unroll": config.scan_unroll,
        "fill": step.packed.fill,
    }
    if config.peer is None:
        rates = [ours() for _ in range(config.runs)]
        return report("train_step", "tokens/s", rates, **_spread(rates), **workload)
    rates = []
    with torch_peer(directory) as (connection, arrangements, (padded, selected)):
        for run in range(config.runs):
            for name, figures in arrangements.items():
                rates.append(ours())
                connection.send(name)
                figures.append(w1.TOKENS / connection.recv())
                print(
                    f"run {run + 1}: ours {rates[-1]:,.0f}, torch {name} {figures[-1]:,.0f} "
                    "tokens/s",
                    flush=True,
                )
    medians = {name: statistics.median(figures) for name, figures in arrangements.items()}
    best = max(medians, key=medians.__getitem__)
    value = statistics.median(rates)

    def over(names: Any) -> float:
        return float(f"{value / max(medians[name] for name in names):.4g}")

    return report(
        "train_step",
        "tokens/s",
        rates,
        peer=config.peer,
        peer_runs=arrangements[best],
        peer_arrangement=best,
        ratio_padded=over(padded),
        ratio_all_logits=over(set(medians) - set(selected)),
        arrangements={name: round(figure) for name, figure in medians.items()},
        **_spread(rates),
        **workload,
    )


def _spread(rates: list[float]) -> dict[str, Any]:
    return {"slowest": min(rates), "fastest": max(rates)}


def main(argv: list[str] | None = None) -> None:
    config = parse(Config, argv, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        measure(config, Path(folder))


if __name__ == "__main__":
    run_main(main)
