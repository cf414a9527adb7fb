"""The tokenizer and chat template inside a GGUF file.

Byte-level BPE only, with the ways of cutting text into words that are listed in `_SPLITS`.
`transformers` can read tokenizers from GGUF too, but only where torch is installed, and it cuts
SmolLM's text as if it were GPT-2's (two blanks before a digit come out differently).
SentencePiece vocabularies are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as words

from fastask_jax.model.gguf import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4


def _smollm(tokenizer: Tokenizer) -> None:
    """Every digit alone, the rest as in GPT-2."""
    tokenizer.pre_tokenizer = words.Sequence(
        [words.Digits(individual_digits=True), words.ByteLevel(add_prefix_space=False)]
    )


def _gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = words.ByteLevel(add_prefix_space=False)


def _qwen2(tokenizer: Tokenizer) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words.Sequence(
        [
            words.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            words.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# By `tokenizer.ggml.pre`.
_SPLITS: dict[str, Callable[[Tokenizer], None]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "qwen2": _qwen2,
}


def gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, with its special tokens and chat template.

    Raises:
      FileNotFoundError, ImportError: as for `GGUFFile`.
      ValueError: the file can't be read, or has a tokenizer of another kind.
    """
    from transformers import PreTrainedTokenizerFast

    file = GGUFFile(path)

    def value(key: str, *default: Any) -> Any:
        found = file.metadata.get(f"tokenizer.{key}", *default)
        if found is None and not default:
            raise ValueError(f"{path} lacks tokenizer.{key}; use a file that holds a tokenizer")
        return found

    kind, split = value("ggml.model"), value("ggml.pre", None)
    if kind != "gpt2" or split not in _SPLITS:
        raise ValueError(
            f"{path} has a tokenizer of model {kind!r} and split {split!r}; supported are model "
            f"'gpt2' with {', '.join(map(repr, _SPLITS))}"
        )
    tokens, types = value("ggml.tokens"), value("ggml.token_type", [])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise ValueError(f"{path} lists a token twice")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # tokenizers raise bare Exceptions
        raise ValueError(f"{path} has a tokenizer that can't be built: {error}") from None
    _SPLITS[split](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {
        name: tokens[index]
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
        if (index := value(f"ggml.{key}", None)) is not None and index < len(tokens)
    }
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    if value("ggml.add_bos_token", False):
        bos = names.get("bos_token")
        if bos is None:
            raise ValueError(f"{path} wants its texts to begin with a token that it doesn't name")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=value("chat_template", None),
        **names,
    )
