"""W2 as llama.cpp runs it, through the C interface of `llama-cpp-python`: batched slots, float32.

The weights are those of the same file, written out as float32 once; keys and values are float32
too.  Each step decodes one token in all slots by one call, as llama.cpp's server does.  Flash
attention is off: on a CPU it takes longer.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from experiments.bench import w2

# ggml's number for 32-bit floats, and llama.cpp's for a file of them.
_F32 = 0


class Peer:
    """SmolLM2 in float32, from the same file."""

    def __init__(self, path: str, prompts: list[list[int]], tools: list[list[list[int]]]) -> None:
        self.prompts, self.tools = prompts, tools
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder, "float32.gguf")
            how = llama_cpp.llama_model_quantize_default_params()
            how.ftype, how.allow_requantize = _F32, True
            if llama_cpp.llama_model_quantize(path.encode(), str(whole).encode(), how):
                raise RuntimeError(f"llama.cpp can't write {path} as float32")
            self.model = llama_cpp.llama_model_load_from_file(
                str(whole).encode(), llama_cpp.llama_model_default_params()
            )
            if not self.model:
                raise RuntimeError(f"llama.cpp can't load {whole}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = len(prompts) * w2.CONTEXT
        settings.n_seq_max = len(prompts)
        settings.n_batch, settings.n_ubatch = len(prompts) * w2.PROMPT, 512
        settings.n_threads = settings.n_threads_batch = os.cpu_count() or 1
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.type_k = settings.type_v = _F32
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError("llama.cpp can't make a context for the workload")
        self._batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        self._length = 0

    def run(self, kept: bool, seed: int) -> float:
        """Seconds of the whole workload; its cache is always kept."""
        assert kept
        sampler = llama_cpp.llama_sampler_init_dist(seed)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self._length = 0
        began = time.perf_counter()
        pending = self._feed(self.prompts, sampler)
        for turn in range(w2.TURNS):
            # The first token of the turn came with the text before it.
            for _ in range(w2.SAMPLED - 1):
                pending = self._step(pending, sampler)
            if turn < w2.TURNS - 1:
                texts = [[p, *tools[turn]] for p, tools in zip(pending, self.tools, strict=True)]
                pending = self._feed(texts, sampler)
        seconds = time.perf_counter() - began
        llama_cpp.llama_sampler_free(sampler)
        assert self._length == w2.CONTEXT - 1  # the last token is sampled and not fed
        return seconds

    def _feed(self, texts: Sequence[Sequence[int]], sampler: Any) -> list[int]:
        """Reads a text of one length in each slot; returns the token that each samples next."""
        count = len(texts[0])
        tokens = [
            (token, self._length + n, slot)
            for slot, text in enumerate(texts)
            for n, token in enumerate(text)
        ]
        return self._decode(tokens, [n % count == count - 1 for n in range(len(tokens))], sampler)

    def _step(self, pending: Sequence[int], sampler: Any) -> list[int]:
        tokens = [(token, self._length, slot) for slot, token in enumerate(pending)]
        return self._decode(tokens, [True] * len(tokens), sampler)

    def _decode(
        self, tokens: Sequence[tuple[int, int, int]], wanted: Sequence[bool], sampler: Any
    ) -> list[int]:
        """Feeds (token, place, slot) by one call, and samples behind those that are wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, (token, position, slot) in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot
            batch.logits[row] = wanted[row]
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp has failed to decode")
        self._length += len(tokens) // len(self.prompts)
        return [
            llama_cpp.llama_sampler_sample(sampler, self.context, row)
            for row, want in enumerate(wanted)
            if want
        ]
