"""Workload W2: what 16 conversations with tools are made of, token by token.

SmolLM2-135M-Instruct in float32.  Each conversation has a prompt of 400 tokens and four turns of
48 sampled tokens, each but the last followed by a tool's answer of 96.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see"
).split()
PROMPT, TURNS, SAMPLED, TOOL = 400, 4, 48, 96
CONTEXT = PROMPT + TURNS * SAMPLED + (TURNS - 1) * TOOL
DIGEST = "84a64cdcbf871957"


def text(seed: int) -> str:
    """700 words by a linear congruential generator, a full stop after every 12th."""
    x, words = seed, []
    for number in range(1, 701):
        x = (1103515245 * x + 12345) % 2**31
        words.append(WORDS[(x >> 16) % 64] + ("." if number % 12 == 0 else ""))
    return " ".join(words)


def workload(tokenizer: Any, episodes: int = 16) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Ids of each episode's prompt, and of its tools' answers turn by turn.

    Raises ValueError when the tokenizer doesn't give the workload's tokens.
    """

    def ids(words: str, count: int) -> list[int]:
        found = tokenizer(words, add_special_tokens=False)["input_ids"][:count]
        return [int(token) for token in found]

    prompts = [ids(f"Task {e}: " + text(1000 + e), PROMPT) for e in range(16)]
    tools = [
        [ids(f"\nResult {e}.{t}:\n" + text(5000 + 10 * e + t), TOOL) for t in range(TURNS)]
        for e in range(16)
    ]
    digest = hashlib.sha256(json.dumps([prompts, tools]).encode()).hexdigest()
    if not digest.startswith(DIGEST):
        raise ValueError(f"the tokenizer isn't SmolLM2's: digest {digest[:16]}, not {DIGEST}")
    return prompts[:episodes], tools[:episodes]
