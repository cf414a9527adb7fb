"""W2 as `transformers` runs it: `generate` on a batch, its cache kept between turns or not."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.bench import w2


class Peer:
    """SmolLM2 in float32, from the same file."""

    def __init__(self, path: str, prompts: list[list[int]], tools: list[list[list[int]]]) -> None:
        folder, _, file = path.rpartition("/")
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32
        )
        self.model.eval()
        self.prompts = torch.tensor(prompts)
        self.tools = torch.tensor(tools)

    def run(self, kept: bool, seed: int) -> float:
        """Seconds of the whole workload; `kept`: the cache goes from turn to turn."""
        torch.manual_seed(seed)
        began = time.perf_counter()
        ids, cache = self.prompts, DynamicCache() if kept else None
        for turn in range(w2.TURNS):
            extra: dict[str, Any] = {"past_key_values": cache} if kept else {}
            with torch.inference_mode():
                ids = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0,
                    top_k=0, top_p=1.0, min_new_tokens=w2.SAMPLED, max_new_tokens=w2.SAMPLED,
                    pad_token_id=0, **extra,
                )  # fmt: skip
            if turn < w2.TURNS - 1:
                ids = torch.cat([ids, self.tools[:, turn]], dim=1)
        assert ids.shape[1] == w2.CONTEXT
        return time.perf_counter() - began
