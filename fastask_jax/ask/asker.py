"""A loaded policy that answers questions about workbooks, one at a time.

Cheap checks come first: the checkpoint's files, then the sandbox, and only then JAX and the
weights.  One engine with one slot and one shape per function serves every question, so the
first question compiles and the others don't; a compile cache on disk saves later processes most
of that.  Decoding is greedy.  Left out: several questions at once, and second opinions.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.core import Message, Reply, Score, Step, ToolSpec
from envs.fast_ask.env import FastAskEnv, opening
from envs.sandbox import Sandbox, SandboxConfig, SandboxUnavailable
from envs.workbook import BlockStore, Workbook, read_workbook
from fastask_jax.ask.answer import Answer, AskError
from fastask_jax.ask.checkpoint import PolicyFolder, find_policy
from fastask_jax.compiled import keep_compiled

if TYPE_CHECKING:
    from fastask_jax.policies.engine import EnginePolicy

MAX_LEN = 2048
MAX_TURN_TOKENS = 256


class Asker:
    """Loads a policy once and answers with it.  Not thread-safe; close it, or use `with`.

    checkpoint: a run directory, a policy folder, or None for the shipped weights.
    max_len: tokens of a whole episode; what the tools show counts too.
    sandbox: limits of the Python that the model may run.
    store: where large workbooks are kept, to be opened faster the next time.
    compile_cache: a folder in which compiled functions are kept for later processes; it becomes
        JAX's for this process.  Whoever can write there can run code here.

    Raises AskError for a checkpoint that can't be found or loaded, and where the sandbox of
    `run_python` isn't available.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        max_len: int = MAX_LEN,
        sandbox: SandboxConfig | None = None,
        store: BlockStore | None = None,
        compile_cache: Path | None = None,
    ) -> None:
        folder = find_policy(None if checkpoint is None else Path(checkpoint))
        self.checkpoint = str(folder.path)
        self._config, self._store = folder.env, store
        self._closed = False
        try:
            self._sandbox = Sandbox(sandbox)
        except SandboxUnavailable as error:
            raise AskError(f"run_python isn't available here: {error}") from error
        try:
            if compile_cache is not None:
                keep_compiled(compile_cache)
            self._policy = _load(folder, max_len)
        except BaseException:
            self._sandbox.close()
            raise

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the sandbox and its processes."""
        self._closed = True
        self._sandbox.close()

    def ask(self, book: Workbook | str | os.PathLike[str], question: str) -> Answer:
        """Answers a question about a workbook file, or one already read.

        The answer's `answer` is None when the model gives none.  Raises FileNotFoundError and
        WorkbookError for the file, AskError for an empty question or one that is too long, when
        the sandbox fails, and when the asker is closed.
        """
        if self._closed:
            raise AskError("this asker is closed; make a new one to ask more")
        began = time.perf_counter()
        if not isinstance(book, Workbook):
            with closing(read_workbook(book, store=self._store)) as opened:
                return self._ask(opened, question, began)
        return self._ask(book, question, began)

    def _ask(self, book: Workbook, question: str, began: float) -> Answer:
        question = " ".join(question.split())
        if not question:
            raise AskError("the question is empty; ask about one value in the workbook")
        self._check_length(book, question)
        env = FastAskEnv(self._config, self._sandbox)
        asked = _Asked(env, book)
        trajectory = self._policy.run(asked, _Question(question))
        if trajectory.error is not None or trajectory.score is None:
            raise AskError(f"the question was broken off ({trajectory.error}); ask again")
        info = trajectory.score.info
        return Answer(
            answer=info["answer"] or None,
            raw=env.final.content if env.final else "",
            transcript=tuple(asked.transcript),
            evidence=tuple(dict.fromkeys(info["ranges"])),
            turns=info["turns"],
            cells=info["cells"],
            tool_calls=info["tool_calls"],
            stop_reason=trajectory.stop_reason or "no_answer",
            seconds=round(time.perf_counter() - began, 3),
            checkpoint=self.checkpoint,
            uncalculated=book.uncalculated(),
        )

    def _check_length(self, book: Workbook, question: str) -> None:
        policy = self._policy
        shown = _Asked.tools if policy.config.tools_in_prompt else None
        messages = opening(question, book.names(), self._config)
        most = policy.engine.config.max_len
        # Encoding takes long where this bound alone refuses.
        length, told = sum(policy.chat.least_tokens(m.content) for m in messages), "at least "
        if length < most:
            length, told = len(policy.chat.encode_prompt(messages, shown)), ""
        if length >= most:
            raise AskError(
                f"the question and the sheet names take {told}{length:,} tokens and the model "
                f"holds {most:,}; ask more briefly, or split the workbook if it has very many "
                "sheets"
            )


@dataclass(frozen=True)
class _Question:
    """The task of a free question."""

    text: str
    id: str = "question"


class _Asked:
    """The environment of a free question about `book`."""

    tools: tuple[ToolSpec, ...] = FastAskEnv.tools

    def __init__(self, env: FastAskEnv, book: Workbook) -> None:
        self._env, self._book = env, book
        self.transcript: list[str] = []

    def reset(self, task: _Question) -> list[Message]:
        return self._env.ask(self._book, task.text)

    def step(self, reply: Reply) -> Step:
        step = self._env.step(reply)
        self.transcript += [reply.content] if reply.content else []
        self.transcript += [f"{call.name}({_spelled(call.arguments)})" for call in reply.tool_calls]
        self.transcript += [message.content for message in step.messages]
        return step

    def score(self) -> Score:
        return self._env.score()

    def close(self) -> None:
        self._env.close()


def _spelled(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _load(folder: PolicyFolder, max_len: int) -> EnginePolicy:
    """Raises AskError for files that don't load or don't belong together."""
    from fastask_jax.model import check_finite, load_params
    from fastask_jax.model.tokenizers import load_tokenizer
    from fastask_jax.policies.engine import EnginePolicy
    from fastask_jax.rollout.chat import ChatFormat
    from fastask_jax.rollout.engine import EngineConfig
    from fastask_jax.rollout.scheduler import RolloutConfig

    try:
        model, params = load_params(folder.path)
        check_finite(params, "its weights")
        chat = ChatFormat(load_tokenizer(folder.path))
        chat.check_fits(model.vocab_size, "the model")
    except Exception as error:  # tokenizers raise bare Exceptions
        raise AskError(f"the checkpoint {folder.path} can't be loaded: {error}") from error
    return EnginePolicy(
        model,
        params,
        chat,
        config=RolloutConfig(
            temperature=0.0,
            max_turn_tokens=MAX_TURN_TOKENS,
            tools_in_prompt=folder.tools_in_prompt,
        ),
        # One shape of each kind: at one slot of a small model, compiling costs more than padding.
        engine=EngineConfig(
            slots=1,
            max_len=max_len,
            append_rows=1,
            append_buckets=(128,),
            attend_buckets=(max_len,),
            decode_steps=16,
        ),
    )
