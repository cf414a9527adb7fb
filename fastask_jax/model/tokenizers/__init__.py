"""The shipped tokenizer and weights, and how a policy folder's own tokenizer is found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZERS = Path(__file__).parent
WEIGHTS = TOKENIZERS.parent / "weights"
TINY = "tiny"


def shipped_weights(model: str) -> Path:
    """The folder of a preset's weights in the package; FileNotFoundError if it has none."""
    folder = WEIGHTS / model
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"no weights for {model!r} come with the package; give a folder with --weights"
        )
    return folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a policy folder, or the tiny one where the folder holds none."""
    from transformers import PreTrainedTokenizerFast

    source = folder if (folder / "tokenizer.json").exists() else TOKENIZERS / TINY
    return PreTrainedTokenizerFast.from_pretrained(source)
