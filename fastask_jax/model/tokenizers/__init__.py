"""Where the shipped tokenizers lie."""

from pathlib import Path

TOKENIZERS = Path(__file__).parent
TINY = "tiny"
