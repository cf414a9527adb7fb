"""The optimizer step of W1 as torch and `transformers` do it, in several arrangements.

`LlamaForCausalLM` with its scaled-dot-product attention, AdamW fused, the gradient accumulated
over micro-batches.  Every arrangement computes the logits of all positions that it asks the model
for, as trainers do; `selected` alone hands only the model's tokens to the head.  Left out:
`torch.compile`, which no such trainer turns on for CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from experiments.bench import w1


@dataclass(frozen=True)
class Arrangement:
    """rows: sequences of a micro-batch.  by_length: the sequences are sorted first.

    layout: "right", padding behind each sequence; "sides", as TRL has it: prompts are padded in
    front, completions behind, and only completions get logits.
    to: what sequences are padded to, the longest of their micro-batch or (as TRL does) of the
    batch.  selected: only the model's tokens get logits.
    """

    rows: int
    by_length: bool = False
    layout: Literal["right", "sides"] = "right"
    to: Literal["micro-batch", "batch"] = "micro-batch"
    selected: bool = False


ARRANGEMENTS = {
    "1": Arrangement(1),
    "4-sorted": Arrangement(4, by_length=True),
    "8-sorted": Arrangement(8, by_length=True),
    "4": Arrangement(4),
    "8": Arrangement(8),
    "trl-4": Arrangement(4, layout="sides", to="batch"),
    "trl-8": Arrangement(8, layout="sides", to="batch"),
    "1-selected": Arrangement(1, selected=True),
    "4-sorted-selected": Arrangement(4, by_length=True, selected=True),
}
PADDED = ("trl-4", "trl-8")
SELECTED = tuple(name for name, a in ARRANGEMENTS.items() if a.selected)


class Micro(NamedTuple):
    """ids [rows, length].  visible, positions: like it, or None where padding is only behind, so
    that the causal mask is enough.  kept: the last positions, whose logits are wanted.  targets,
    mask, recorded, advantages [rows, kept]: of the token after each of them."""

    ids: torch.Tensor
    visible: torch.Tensor | None
    positions: torch.Tensor | None
    kept: int
    targets: torch.Tensor
    mask: torch.Tensor
    recorded: torch.Tensor
    advantages: torch.Tensor


def micro_batches(sequences: list[w1.Sequence], arrangement: Arrangement) -> list[Micro]:
    """The batch, cut and padded."""
    if arrangement.by_length:
        sequences = sorted(sequences, key=len)
    parts = [
        sequences[i : i + arrangement.rows] for i in range(0, len(sequences), arrangement.rows)
    ]
    return [
        _pad(part, sequences if arrangement.to == "batch" else part, arrangement.layout)
        for part in parts
    ]


def _pad(part: list[w1.Sequence], among: list[w1.Sequence], layout: str) -> Micro:
    """`part` padded to the longest `among` them."""
    sides = layout == "sides"
    before = max(s.prompt for s in among) if sides else 0
    behind = max(len(s) - (s.prompt if sides else 0) for s in among)
    shape = (len(part), before + behind)
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    visible, mask = np.zeros(shape, bool), np.zeros(shape, bool)
    recorded = np.zeros(shape, np.float32)
    for row, sequence in enumerate(part):
        start = before - (sequence.prompt if sides else 0)
        span = row, slice(start, start + len(sequence))
        ids[span], mask[span], recorded[span] = sequence.ids, sequence.mask, sequence.logprobs
        visible[span], positions[span] = True, np.arange(len(sequence))
    # The last prompt token predicts the first of the completion.
    kept = behind + 1 if sides else behind

    def following(x: np.ndarray) -> torch.Tensor:
        after = np.concatenate([x[:, 1:], np.zeros_like(x[:, :1])], axis=1)
        return torch.from_numpy(after[:, -kept:].copy())

    advantages = torch.tensor([[s.advantage] for s in part], dtype=torch.float32)
    return Micro(
        ids=torch.from_numpy(ids),
        visible=torch.from_numpy(visible) if sides else None,
        positions=torch.from_numpy(positions) if sides else None,
        kept=kept,
        targets=following(ids),
        mask=following(mask),
        recorded=following(recorded),
        advantages=advantages.expand(-1, kept),
    )


class TorchStep:
    """Steps of a model directory's weights, in any arrangement."""

    def __init__(self, directory: Path, threads: int):
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self._weights = {k: v.clone() for k, v in self._model.state_dict().items()}
        sequences = w1.batch()
        self._batches = {
            name: micro_batches(sequences, arrangement)
            for name, arrangement in ARRANGEMENTS.items()
        }
        self.restart()

    def restart(self) -> None:
        """Back to the first weights and a fresh optimizer."""
        self._model.load_state_dict(self._weights)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=w1.LEARNING_RATE,
            betas=w1.BETAS,
            eps=w1.EPS,
            weight_decay=w1.WEIGHT_DECAY,
            fused=True,
        )

    def __call__(self, name: str) -> tuple[float, float]:
        """One step; its loss, and its gradient's norm before clipping."""
        total = 0.0
        for micro in self._batches[name]:
            logprobs, recorded, advantages = self._scores(micro, ARRANGEMENTS[name].selected)
            ratio = torch.exp(logprobs - recorded)
            bounded = ratio.clamp(1 - w1.CLIP, 1 + w1.CLIP)
            loss = -torch.minimum(ratio * advantages, bounded * advantages).sum() / w1.MODEL_TOKENS
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), w1.MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, float(norm)

    def _scores(self, micro: Micro, selected: bool) -> tuple[torch.Tensor, ...]:
        """Logprobs of the model's tokens, with what was recorded and the advantages."""
        inputs = {"input_ids": micro.ids, "use_cache": False}
        if micro.visible is not None:
            inputs |= {"attention_mask": micro.visible, "position_ids": micro.positions}
        mask = micro.mask
        if selected:
            hidden = self._model.model(**inputs).last_hidden_state[:, -micro.kept :]
            logprobs = -functional.cross_entropy(
                self._model.lm_head(hidden[mask]), micro.targets[mask], reduction="none"
            )
        else:
            logits = self._model(**inputs, logits_to_keep=micro.kept).logits
            logprobs = -functional.cross_entropy(
                logits.view(-1, w1.VOCAB), micro.targets.view(-1), reduction="none"
            )
            logprobs = logprobs.view(mask.shape)[mask]
        return logprobs, micro.recorded[mask], micro.advantages[mask]
