"""Chat format: messages to token ids, sampled ids to structured replies.

A trajectory is one growing list of ids (token in, token out).  This module therefore never
renders a whole conversation again: it encodes the prompt once, and after each model turn only
what the chat template puts between that turn's stop token and the model's next turn.  Both are
found by rendering differences of the tokenizer's own template, and the construction of a
`ChatFormat` proves on a probe conversation that the template is append-only.

Text inside a message or a tool's schema can never turn into a special token: contents are
encoded with a copy of the tokenizer that has no added tokens, so a tool result that spells out
"<|im_end|>" is just text.  Parsing what the model wrote lives in `fastask_jax.rollout.toolcalls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from envs.core import Message, Reply, ToolCall, ToolSpec
from fastask_jax.rollout.toolcalls import HOW_TO_CALL, parse_reply_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PROBE_REPLY = "probe reply"
_PRIVATE_USE = range(0xF700, 0xF8FF)


class ChatFormatError(ValueError):
    """The tokenizer or its chat template cannot be used token in, token out."""


class ChatFormat:
    """Encodes and parses chat turns with a fast tokenizer that has a chat template.

    tokenizer: `transformers.PreTrainedTokenizerFast` with `chat_template`.
    template_options: extra variables for the template; thinking is off by default.

    Attributes: `stop_id` (the token that ends every turn), `stop_text`, `vocab_size`.
    Raises ChatFormatError when the template is missing, is not append-only for tool turns, or
    when the tokenizer cannot encode regions between special tokens on their own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ChatFormatError(
                "the tokenizer has no chat template; set tokenizer.chat_template before use"
            )
        self.tokenizer = tokenizer
        self._options = {"enable_thinking": False, **(template_options or {})}
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._added = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items()
        }
        if not self._added:
            raise ChatFormatError("the tokenizer has no special tokens to delimit turns with")
        for token in tokenizer.added_tokens_decoder.values():
            if token.lstrip or token.rstrip or token.single_word:
                raise ChatFormatError(
                    f"added token {token.content!r} eats neighbouring text (lstrip, rstrip or "
                    "single_word); such tokenizers are not supported"
                )
        longest_first = sorted(self._added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._plain = _without_added_tokens(self._backend)
        self.vocab_size = len(tokenizer)

        self.stop_text = self._find_stop_text()
        self.stop_id: int = self._added[self.stop_text]
        probe_call = ToolCall("probe", {"value": "x"})
        self._before = (Message("user", "probe"),)
        self._after_call = (*self._before, Message("assistant", "", (probe_call,)))
        self._after_text = (*self._before, Message("assistant", _PROBE_REPLY))
        self._check_encoding()
        problem = self._append_only_problem(_tool_probe(probe_call))
        if problem:
            raise ChatFormatError(f"the chat template is not append-only: {problem}")
        self._user_problem = self._append_only_problem(_user_probe())
        probe = (ToolSpec("probe_tool", "Probes.", {"type": "object", "properties": {}}),)
        self._template_shows_tools = "probe_tool" in self._render(self._before, probe)[0]

    def check_fits(self, vocab_size: int, where: str) -> None:
        """Raises ChatFormatError where a model of `vocab_size` tokens lacks some of these."""
        if self.vocab_size > vocab_size:
            raise ChatFormatError(
                f"{where} knows {vocab_size:,} tokens and its tokenizer {self.vocab_size:,}: they "
                "don't belong together; put the tokenizer.json that it was trained with there"
            )

    # -- encoding ---------------------------------------------------------------------------

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None
    ) -> list[int]:
        """Ids of the conversation so far, ending where the model's turn begins.

        With `tools`, the template's own tools block is part of the prompt.  A template without
        one (SmolLM2's) has the tools described at the end of the system message.
        """
        if tools and not self._template_shows_tools:
            messages, tools = _with_tools_described(messages, tools), None
        return self._encode(*self._render(messages, tools, generation=True))

    def encode_reply(self, message: Message) -> list[int]:
        """Ids that a model would have to sample to say `message`, stop token included.

        For supervised transcripts only; sampled ids are never made this way.
        """
        if message.role != "assistant":
            raise ValueError(f"a reply is an assistant message, not {message.role!r}")
        return self._encode(*self._reply_text(self._before, message))

    def encode_observation(self, messages: Sequence[Message]) -> list[int]:
        """Ids between the model's stop token and its next turn, for these new messages.

        Raises ValueError for an empty list or an assistant message, and ChatFormatError for
        user messages if the template would rewrite earlier turns because of them.
        """
        if not messages or any(m.role not in ("tool", "user") for m in messages):
            raise ValueError("an observation is one or more tool or user messages")
        if self._user_problem and any(m.role == "user" for m in messages):
            raise ChatFormatError(
                "this chat template rewrites earlier turns when a user message follows: "
                f"{self._user_problem}"
            )
        return self._encode(*self._observation_text(messages))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; special-token text in it stays text."""
        return self._plain.encode(_valid(text), add_special_tokens=False).ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of `len(encode_text(text))`, at a fraction of the time.

        A byte-level vocabulary writes each byte as one character, so no token stands for more
        characters than its longest entry has.
        """
        normalizer = self._plain.normalizer
        shown = normalizer.normalize_str(_valid(text)) if normalizer else text
        return -(-len(shown) // self._longest_token)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._plain.get_vocab()))

    # -- decoding ---------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def lengths(self, ids: Sequence[int]) -> list[int]:
        """How many characters of `decode(ids)` each id adds; their sum is the text's length.

        Of a character that several tokens make, the last of them has the whole.
        """
        stream, left, found = DecodeStream(skip_special_tokens=False), len(self.decode(ids)), []
        for i in ids:
            piece = min(left, len(stream.step(self._backend, int(i)) or ""))
            found.append(piece)
            left -= piece
        if found:  # bytes that never became a character
            found[-1] += left
        return found

    def parse_reply(
        self,
        reply: str | Sequence[int],
        tools: Sequence[ToolSpec] = (),
        stop_reason: str = "stop",
    ) -> Reply:
        """The structured reply in sampled ids (or in text); never raises on model output.

        `tools` gives the parameter types; `Reply.tokens` is the number of ids (0 for text).
        """
        text = reply if isinstance(reply, str) else self.decode(reply)
        count = 0 if isinstance(reply, str) else len(reply)
        content, calls = parse_reply_text(text.removesuffix(self.stop_text), tools)
        return Reply(content, calls, count, stop_reason)

    # -- rendering --------------------------------------------------------------------------

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        generation: bool = False,
    ) -> tuple[str, str]:
        """The template's text, and the guard character that breaks up special-token text in
        contents (empty when none was needed)."""
        plain = [_as_dict(m) for m in messages]
        schemas = [_as_schema(tool) for tool in tools or ()]
        guard = ""
        if any(self._split.search(text) for text in _strings([plain, schemas])):
            guard = _unused_character(_strings([plain, schemas]))
            plain, schemas = _map_strings(
                [plain, schemas], lambda text: self._break_up(text, guard)
            )
        try:
            text = self.tokenizer.apply_chat_template(
                plain,
                tools=schemas or None,
                tokenize=False,
                add_generation_prompt=generation,
                **self._options,
            )
        except Exception as error:  # templates raise whatever they like
            roles = ", ".join(m.role for m in messages)
            raise ChatFormatError(
                f"the chat template cannot render a conversation of roles {roles}: {error}"
            ) from error
        return text, guard

    def _break_up(self, text: str, guard: str) -> str:
        return self._split.sub(lambda match: "".join(c + guard for c in match[0]), text)

    def _encode(self, text: str, guard: str) -> list[int]:
        ids: list[int] = []
        for index, piece in enumerate(self._split.split(text)):
            if index % 2:
                ids.append(self._added[piece])
            elif piece:
                ids.extend(self.encode_text(piece.replace(guard, "") if guard else piece))
        return ids

    def _reply_text(self, before: Sequence[Message], message: Message) -> tuple[str, str]:
        header, _ = self._render(before, generation=True)
        text, guard = self._render([*before, message])
        if not text.startswith(header):
            raise ChatFormatError(
                "the chat template is not append-only: an assistant turn in the history starts "
                "otherwise than the generation prompt"
            )
        return text[len(header) : self._end_of_turn(text)], guard

    def _observation_text(self, messages: Sequence[Message]) -> tuple[str, str]:
        has_tool = any(m.role == "tool" for m in messages)
        before = self._after_call if has_tool else self._after_text
        history, _ = self._render(before)
        history = history[: self._end_of_turn(history)]
        text, guard = self._render([*before, *messages], generation=True)
        if not text.startswith(history):
            raise ChatFormatError(
                "the chat template is not append-only: an assistant turn renders differently "
                f"once {messages[0].role} messages follow it"
            )
        return text[len(history) :], guard

    def _end_of_turn(self, text: str) -> int:
        return text.rindex(self.stop_text) + len(self.stop_text)

    # -- checks at construction -------------------------------------------------------------

    def _find_stop_text(self) -> str:
        text, _ = self._render([Message("user", "probe"), Message("assistant", _PROBE_REPLY)])
        match = self._split.match(text, text.index(_PROBE_REPLY) + len(_PROBE_REPLY))
        if match is None:
            raise ChatFormatError("the chat template ends assistant turns without a stop token")
        return match[0]

    def _append_only_problem(self, conversation: Sequence[Message]) -> str | None:
        """Why prompt + replies + observations is not the rendered conversation, or None."""
        try:
            parts = [self._render(conversation[:1], generation=True)[0]]
            start = 1
            while start < len(conversation):
                parts.append(self._reply_text(self._before, conversation[start])[0])
                end = start + 1
                while end < len(conversation) and conversation[end].role != "assistant":
                    end += 1
                if end < len(conversation):
                    parts.append(self._observation_text(conversation[start + 1 : end])[0])
                start = end
            whole, _ = self._render(conversation)
        except ChatFormatError as error:
            return str(error)
        whole, joined = whole[: self._end_of_turn(whole)], "".join(parts)
        if joined == whole:
            return None
        same = next((i for i, (a, b) in enumerate(zip(joined, whole, strict=False)) if a != b), 0)
        return (
            f"turn by turn gives {joined[same : same + 40]!r} where the whole conversation has "
            f"{whole[same : same + 40]!r}"
        )

    def _check_encoding(self) -> None:
        text, guard = self._render(self._after_call, generation=True)
        ids = self._encode(text, guard)
        if ids != list(self.tokenizer(text, add_special_tokens=False)["input_ids"]):
            raise ChatFormatError(
                "this tokenizer encodes text between special tokens differently on its own; "
                "use a byte-level BPE tokenizer"
            )
        specials = set(self._added.values())
        for content in self._added:
            if specials.intersection(self.encode_text(content)):
                raise ChatFormatError(f"plain text {content!r} still encodes as a special token")


def _tool_probe(call: ToolCall) -> list[Message]:
    return [
        Message("user", "probe question"),
        Message("assistant", "", (call,)),
        Message("tool", "first result\n"),
        Message("assistant", "some words", (call, call)),
        Message("tool", "second"),
        Message("tool", "third"),
        Message("assistant", "done"),
    ]


def _user_probe() -> list[Message]:
    return [
        Message("user", "probe question"),
        Message("assistant", "some words"),
        Message("user", "probe again"),
        Message("assistant", "done"),
    ]


def _valid(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """A copy that treats special-token text as plain text and adds nothing of its own."""
    state = json.loads(backend.to_str())
    state.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(state))


def _as_dict(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
    return plain


def _with_tools_described(
    messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[Message]:
    schemas = "\n".join(json.dumps(_as_schema(tool)["function"]) for tool in tools)
    text = f"Your tools:\n{schemas}\n{HOW_TO_CALL}"
    if messages and messages[0].role == "system":
        text, messages = f"{messages[0].content}\n\n{text}", messages[1:]
    return [Message("system", text), *messages]


def _as_schema(tool: ToolSpec) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, function: Any) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {function(key): _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, function) for item in value]
    return value


def _unused_character(texts: Iterable[str]) -> str:
    used = set("".join(texts))
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise ValueError("a message uses every private-use character; remove some of them")
