"""Progress of a run: a bar on a terminal, plain lines elsewhere (logs, CI, notebooks' files).

Shows step, reward, accuracy, turns and tokens per second.  Leaves out everything else: that is
in metrics.jsonl.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Self, TextIO

from tqdm import tqdm

from fastask_jax.report.metrics import ACCURACY, REWARD, TOKENS_PER_SECOND, TURNS

_SHOWN = (
    (REWARD, "reward {:.3f}"),
    (ACCURACY, "accuracy {:.1%}"),
    (TURNS, "turns {:.1f}"),
    (TOKENS_PER_SECOND, "{:,.0f} tokens/s"),
)


class Progress:
    """Counts steps up to `total`, starting at `start` (a resumed run).

    stream: where to write (stderr by default); on a terminal a bar is drawn, elsewhere one line
    is written every `every` steps and for the last one.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        label: str = "training",
        every: int = 1,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.start, self.label, self.every = total, start, label, max(1, every)
        self._stream = sys.stderr if stream is None else stream
        self._began = time.monotonic()
        self._step = start
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total,
                initial=start,
                desc=label,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining}{postfix}",
            )

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Step `step` (counted from 1) is done; `values` is its line of metrics."""
        self._step = step
        text = "  ".join(form.format(values[n]) for n, form in _SHOWN if n in values)
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str(text)  # also redraws
        elif (step - self.start) % self.every == 0 or step == self.total:
            self._line(f"{self.label} {step:>{len(str(self.total))}}/{self.total}  {text}", True)

    def note(self, text: str) -> None:
        """A line that stays, above the bar: an evaluation, a saved checkpoint."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._line(text, False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _line(self, text: str, clock: bool) -> None:
        if clock:
            spent = time.monotonic() - self._began
            left = spent / max(1, self._step - self.start) * (self.total - self._step)
            text += f"  [{tqdm.format_interval(spent)}<{tqdm.format_interval(left)}]"
        print(text, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
