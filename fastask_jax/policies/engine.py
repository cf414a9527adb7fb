"""Our own decoding engine as a policy: one episode at a time, as `fastask ask` needs it.

`EnginePolicy` speaks the `Policy` protocol (messages in, reply out) over one slot of an engine
and keeps the token-exact trajectory of its episode.  `run` instead plays and scores a whole
episode in an environment, with every budget looked after.  Training and evaluation run many
episodes at once, with `fastask_jax.rollout.scheduler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs.core import Environment, Message, Reply, ToolSpec
from fastask_jax.model import ModelConfig
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Engine, EngineConfig, Params, Turn
from fastask_jax.rollout.pools import InlinePool
from fastask_jax.rollout.sampling import episode_key
from fastask_jax.rollout.scheduler import RolloutConfig, rollout
from fastask_jax.rollout.transcript import Trajectory


class EnginePolicy:
    """Samples replies with `params` in slot 0 of a small engine.

    model: the architecture of `params`.  config: budgets and temperature; greedy by default.
    A turn that runs into a budget is a reply with stop_reason "length".
    Attribute `trajectory`: the episode so far, token by token.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        chat: ChatFormat,
        *,
        version: int = 0,
        config: RolloutConfig | None = None,
        engine: EngineConfig | None = None,
        seed: int | str = 0,
    ) -> None:
        self.params, self.version, self.chat, self.seed = params, version, chat, seed
        self.config = config or RolloutConfig(temperature=0.0)
        self.engine = Engine(model, engine or EngineConfig(slots=1), chat.stop_id)
        self.trajectory: Trajectory | None = None
        self._tools: tuple[ToolSpec, ...] = ()

    def start(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], task: Any = None
    ) -> Reply:
        """Begins an episode in a zeroed slot; `task` only names it for the sampling key.

        Raises ValueError when the prompt doesn't fit into the slot.
        """
        self._tools = tools
        ids = self.chat.encode_prompt(messages, tools if self.config.tools_in_prompt else None)
        self.engine.append(self.params, {0: ids}, fresh=True)
        name = str(getattr(task, "id", 0))
        self._key = episode_key(self.seed, name, 0, 0)
        self.trajectory = Trajectory(name, 0, 0, task)
        self.trajectory.add_prompt(ids)
        return self._sample(self.trajectory)

    def reply(self, messages: Sequence[Message]) -> Reply:
        """Goes on with the messages that are new since the last reply.

        Where they leave no room to answer, the reply is empty with stop_reason "length".
        """
        if self.trajectory is None:
            raise ValueError("start an episode first")
        ids = self.chat.encode_observation(messages)
        if int(self.trajectory.ids[-1]) != self.chat.stop_id:
            ids = [self.chat.stop_id, *ids]
        if len(ids) >= self.engine.room(0):
            return Reply("", stop_reason="length")
        self.engine.append(self.params, {0: ids})
        self.trajectory.add_observation(ids)
        return self._sample(self.trajectory)

    def _sample(self, trajectory: Trajectory) -> Reply:
        config = self.config
        budget = min(
            config.max_turn_tokens, config.max_tokens - trajectory.sampled, self.engine.room(0)
        )
        if budget <= 0:
            return Reply("", stop_reason="length")
        turn: list[int] = []
        ended = None
        while ended is None:
            order = Turn(self._key, budget - len(turn))
            sampled = self.engine.decode(self.params, {0: order}, config.temperature)[0]
            trajectory.add_sampled(sampled.ids, sampled.logprobs, self.version)
            turn.extend(sampled.ids)
            ended = sampled.ended
        return self.chat.parse_reply(turn, self._tools, ended)

    def run(self, environment: Environment, task: Any = None) -> Trajectory:
        """One scored episode in `environment`, which is closed at its end.

        An exception of the environment is the trajectory's `error`.
        """
        pool = InlinePool(lambda _: environment)
        try:
            [self.trajectory] = rollout(
                self.engine,
                self.params,
                self.version,
                [task],
                1,
                pool,
                self.chat,
                seed=self.seed,
                config=self.config,
                tools=environment.tools,
            )
        finally:
            pool.close()
        return self.trajectory
