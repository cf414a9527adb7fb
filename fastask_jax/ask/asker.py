"""A policy that answers questions about workbooks, one call at a time.

Cheap checks come first: the checkpoint's files, then the sandbox, and only then JAX and the
weights.  One engine with one slot and one shape per function serves every question, so the
first question compiles and the others don't; a compile cache on disk saves later processes most
of that.  Decoding is greedy.  A model that others serve needs no JAX.

Left out: many questions at a time over one engine (`fastask serve`), and second opinions.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from envs.core import Message, Reply
from envs.fast_ask.env import FastAskConfig, FastAskEnv, opening
from envs.sandbox import Sandbox, SandboxConfig, SandboxUnavailable
from envs.workbook import BlockStore, Workbook, read_workbook
from fastask_jax.ask.answer import Answer, AskError, Unreachable, make_answer
from fastask_jax.ask.checkpoint import PolicyFolder, find_policy
from fastask_jax.ask.episode import Asked, Heard, Question, spelled
from fastask_jax.compiled import keep_compiled

if TYPE_CHECKING:
    from fastask_jax.policies.engine import EnginePolicy
    from fastask_jax.policies.remote import RemotePolicy

MAX_LEN = 2048
MAX_TURN_TOKENS = 256


class Asker:
    """Loads a policy once and answers with it.  Close it, or use `with`.

    Questions may come from several threads: of our own engine one waits for the other, models
    elsewhere are asked at the same time.

    checkpoint: a run directory, a policy folder, or None for the shipped weights.
    remote: a model that others serve, in place of a checkpoint; closed with the asker.
    config: how questions are put and their budgets; None takes the checkpoint's, or for `remote`
        the defaults.
    max_len: tokens of a whole episode of our engine; what the tools show counts too.
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
        remote: RemotePolicy | None = None,
        config: FastAskConfig | None = None,
        max_len: int = MAX_LEN,
        sandbox: SandboxConfig | None = None,
        store: BlockStore | None = None,
        compile_cache: Path | None = None,
    ) -> None:
        if remote is not None and checkpoint is not None:
            raise ValueError("give a checkpoint or a remote policy, not both")
        folder = None
        if remote is None:
            folder = find_policy(None if checkpoint is None else Path(checkpoint))
        self.policy = remote.name if folder is None else str(folder.path)  # type: ignore[union-attr]
        self.config = config or (FastAskConfig() if folder is None else folder.env)
        self._store, self._remote = store, remote
        self._closed = False
        try:
            self._sandbox = Sandbox(sandbox)
        except SandboxUnavailable as error:
            raise AskError(f"run_python isn't available here: {error}") from error
        self._engine: EnginePolicy | None = None
        self._turn: AbstractContextManager[object] = nullcontext()
        if folder is None:
            return
        self._turn = threading.Lock()
        try:
            if compile_cache is not None:
                keep_compiled(compile_cache)
            self._engine = _load(folder, max_len)
        except BaseException:
            self._sandbox.close()
            raise

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the sandbox and its processes, and the connection to a server."""
        self._closed = True
        self._sandbox.close()
        if self._remote is not None:
            self._remote.close()

    def ask(
        self,
        book: Workbook | str | os.PathLike[str],
        question: str,
        *,
        heard: Heard = lambda entry: None,
    ) -> Answer:
        """Answers a question about a workbook file, or one already read.

        heard: told of each message and reply, as they come.

        The answer's `answer` is None when the model gives none.  Raises FileNotFoundError and
        WorkbookError for the file, AskError for an empty question or one that is too long, when
        the sandbox fails, and when the asker is closed; Unreachable (an AskError) where the
        model's server doesn't answer, and `policies.remote.Refused` where it wants none of it.
        """
        if self._closed:
            raise AskError("this asker is closed; make a new one to ask more")
        began = time.perf_counter()
        if not isinstance(book, Workbook):
            with closing(read_workbook(book, store=self._store)) as opened:
                return self._ask(opened, question, began, heard)
        return self._ask(book, question, began, heard)

    def _ask(self, book: Workbook, question: str, began: float, heard: Heard) -> Answer:
        question = " ".join(question.split())
        if not question:
            raise AskError("the question is empty; ask about one value in the workbook")
        transcript: list[str] = []
        opened = False

        def hear(entry: Message | Reply) -> None:
            nonlocal opened
            opened = opened or isinstance(entry, Reply)
            if opened:
                transcript.extend(spelled(entry))
            heard(entry)

        asked = Asked(FastAskEnv(self.config, self._sandbox), book, hear)
        if self._engine is not None:
            check_length(self._engine, book, question, self.config)
        player = self._engine or self._remote
        assert player is not None
        with self._turn:
            trajectory = player.run(asked, Question(question))
        if trajectory.error is not None or trajectory.score is None:
            if getattr(trajectory, "lost", False):
                raise Unreachable(f"{trajectory.error}; the question wasn't answered")
            raise AskError(f"the question was broken off ({trajectory.error}); ask again")
        return make_answer(
            question,
            trajectory.score,
            stop_reason=trajectory.stop_reason,
            tokens=trajectory.sampled,
            seconds=time.perf_counter() - began,
            policy=self.policy,
            uncalculated=book.uncalculated(),
            raw=asked.raw,
            transcript=tuple(transcript),
        )


def check_length(
    policy: EnginePolicy, book: Workbook, question: str, config: FastAskConfig
) -> None:
    """Raises AskError for a question that leaves our engine no room to answer."""
    shown = Asked.tools if policy.config.tools_in_prompt else None
    messages = opening(question, book.names(), config)
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
