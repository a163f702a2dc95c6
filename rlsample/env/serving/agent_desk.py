"""The desk for episodes of several agents: each call is for some of them, and is done for all of those or for none."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.serving.episode_desk import EpisodeDesk
from rlsample.env.serving.episode_errors import gone, in_use, no_answer, question_stands, refused
from rlsample.env.serving.episode_registry import EpisodeRegistry
from rlsample.env.serving.lane_rows import MAX_REWARD, checked_logp, checked_reward
from rlsample.env.serving.served_episode import (
    ASKED,
    LOGGED,
    TERMINATED,
    TRUNCATED,
    QueuedRow,
    Refusal,
    ServedEpisode,
)
from rlsample.env.serving.serving_settings import ServingSettings, wait_limit
from rlsample.env.serving.shared_episode import AgentPart, SharedEpisode
from rlsample.errors import ServingError, unknown_name

__all__ = ["AgentDesk"]

_MAX_UNREAD = 10_000  # finished episodes, kept for a caller that never asks; the oldest go first
_LEFT = "has ended for this agent, which cannot come back to it"


class AgentDesk(EpisodeDesk):
    """The calls on shared episodes. An episode's place has a lane for each possible agent.

    Args:
        agents: the possible agents, distinct.

    Attributes:
        agents: as given.
        finished: episodes that were closed and whose rows were all sampled; those without any row are left out.
    """

    agents: tuple[Hashable, ...]

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        agents: Sequence[Hashable],
        max_concurrent: int,
        settings: ServingSettings,
    ) -> None:
        self.agents = tuple(agents)
        self.lanes_per_episode = len(self.agents)
        self._index = {agent: index for index, agent in enumerate(self.agents)}
        self.finished: collections.deque[SharedEpisode] = collections.deque(maxlen=_MAX_UNREAD)
        super().__init__(observation_space, action_space, max_concurrent, settings)

    # ------------------------------------------------------------------ episodes and their lanes

    def _make_registry(self, max_concurrent: int) -> EpisodeRegistry[Any]:
        return EpisodeRegistry(max_concurrent, self.settings.when_full, SharedEpisode)

    def _make_lanes(self, num_lanes: int) -> list[ServedEpisode | None]:
        return [None] * num_lanes

    def break_off(self, episode: Any, reason: str) -> Sequence[ServedEpisode]:
        """As in the base. Where one agent's part breaks off, the episode does, and all parts that have not ended."""
        part = episode if isinstance(episode, AgentPart) else None
        shared: SharedEpisode = episode if part is None else part.shared
        with shared.mutex:
            broken = shared.playing()
            if part is not None and part.closed is not None and not part.dead:
                broken.append(part)  # it had ended, but its rows are still on their way
            for one in broken:
                one.closed = one.closed or reason
            if shared.closed is None:
                self.registry.close(shared, reason)
                self._retire(shared)
            return broken

    def free_lane(self, lane: int) -> None:
        part = self.by_lane[lane]
        assert isinstance(part, AgentPart)
        with part.shared.mutex:
            self.by_lane[lane] = None
            part.shared.lanes_out -= 1
            if part.shared.closed is not None:
                self._retire(part.shared)

    def _retire(self, shared: SharedEpisode) -> None:
        """Frees the place of a closed episode once no part holds a lane."""
        if shared.lanes_out:
            return
        if shared.results:
            self.finished.append(shared)
        self.registry.free_lane(shared.lane)

    # ------------------------------------------------------------------ the calls

    def ask_all(
        self, shared: SharedEpisode, observations: Mapping[Hashable, Any], timeout_s: float | None
    ) -> dict[Hashable, Any]:
        """Waits for the actions; see :meth:`MultiAgentServingEnv.get_action`."""
        limit_s = self._limit_s if timeout_s is None else wait_limit(timeout_s)
        with shared.mutex:
            parts = self._parts(shared, observations, "get_action")
            rows = []
            for part in parts:
                if part.standing:
                    self._require_same(part, observations[part.agent])
                else:
                    rows.append((part, self._row(part, observations[part.agent], ASKED, "get_action")))
            self._send_all(rows)
            for part in parts:
                part.in_call = True
        try:
            if self.registry.stopped:
                for part in parts:
                    self.refuse(part.lane, self.registry.over_error())
            self._await_answers(parts, limit_s)
            for part in parts:
                part.standing = False
        finally:
            for part in parts:
                part.in_call = False
            if self.answered:
                self.pass_on()
        for part in parts:
            if part.answer.__class__ is Refusal:
                raise refused(part, part.answer)
        if parts:
            with shared.mutex:
                shared.steps += 1
        return {part.agent: part.answer for part in parts}

    def _await_answers(self, parts: Sequence[AgentPart], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for count, part in enumerate(parts):
            if part.answered.acquire(False):
                continue
            if self.answered:
                self.pass_on()  # woken for one part, this client has to see that the others are woken too
            part.waiting = True
            try:
                in_time = part.answered.acquire(True, max(0.0, deadline - time.monotonic()))
            finally:
                part.waiting = False
            if not in_time:
                for earlier in parts[:count]:
                    earlier.answered.release()  # its question stands too: the next call takes the answer
                raise no_answer(part, timeout_s)

    def log_all(
        self,
        shared: SharedEpisode,
        observations: Mapping[Hashable, Any],
        actions: Mapping[Hashable, Any],
        logps: Mapping[Hashable, float | None] | None,
    ) -> None:
        """Queues rows that bring their actions; see :meth:`MultiAgentServingEnv.log_action`."""
        self._require_by_agent(observations, "log_action", "observations")
        self._require_by_agent(actions, "log_action", "actions")
        self._require_by_agent({} if logps is None else logps, "log_action", "action_logp")
        logps = logps or {}
        if observations.keys() != actions.keys() or not logps.keys() <= actions.keys():
            raise ServingError(
                f"log_action: observations of {_names(observations)}, actions of {_names(actions)} and action_logp of "
                f"{_names(logps)}: they have to be of the same agents"
            )
        for part in shared.playing():
            if part.agent in actions:
                self._await_room(part)
        with shared.mutex:
            rows = []
            for part in self._idle_parts(shared, actions, "log_action"):
                obs, action, logp = observations[part.agent], actions[part.agent], logps.get(part.agent)
                column = self.lanes.action_copy(action, obs, _of("log_action", part))
                row = self._row(part, obs, LOGGED, "log_action")
                rows.append((part, row._replace(action=column, logp=math.nan if logp is None else checked_logp(logp))))
            self._send_all(rows)
            shared.steps += bool(rows)

    def add_rewards(
        self,
        shared: SharedEpisode,
        rewards: Mapping[Hashable, Any],
        infos: Mapping[Hashable, dict[str, Any]] | None,
    ) -> None:
        """Credits the agents' last actions; see :meth:`MultiAgentServingEnv.log_returns`."""
        self._require_by_agent({} if infos is None else infos, "log_returns", "infos")
        infos = infos or {}
        for agent, info in infos.items():
            if not isinstance(info, dict):
                raise ServingError(f"log_returns: the info of agent {agent!r} must be a dict, got {_kind(info)}")
        with shared.mutex:
            totals = []
            for part in self._idle_parts(shared, rewards, "log_returns"):
                reward = checked_reward(rewards[part.agent])
                total = part.reward + reward
                if not -MAX_REWARD <= total <= MAX_REWARD:
                    raise ServingError(
                        f"log_returns: agent {part.agent!r}: a reward of {reward} makes {total}, no finite float32"
                    )
                totals.append((part, total))
            told = self._idle_parts(shared, infos, "log_returns")
            for part, total in totals:
                if part.acted:
                    part.reward = total
            for part in told:
                if part.acted and infos[part.agent]:
                    part.info = infos[part.agent]

    def end_some(self, shared: SharedEpisode, observations: Mapping[Hashable, Any], truncated: Any) -> None:
        """Queues the final rows of agents that leave; see :meth:`MultiAgentServingEnv.end_agents`."""
        with shared.mutex:
            self._end(self._parts(shared, observations, "end_agents"), observations, truncated, "end_agents")

    def end_all(self, shared: SharedEpisode, observations: Mapping[Hashable, Any], truncated: Any) -> None:
        """Queues the final rows of all agents; see :meth:`MultiAgentServingEnv.end_episode`."""
        with shared.mutex:
            parts = self._parts(shared, observations, "end_episode")
            missing = [part.agent for part in shared.playing() if part not in parts]
            if missing:
                raise ServingError(
                    f"end_episode: no final observation of {_names(missing)}, still in episode {shared.id!r}; give one "
                    "of each agent that has acted and has not left by end_agents"
                )
            self._end(parts, observations, truncated, "end_episode")
            self.registry.close(shared, "has ended")
            self._retire(shared)

    def _end(self, parts: Sequence[AgentPart], observations: Mapping[Hashable, Any], truncated: Any, call: str) -> None:
        cut_off = self._truncation_flags(parts, truncated, call)
        rows, unanswered = [], []
        for part in parts:
            row = self._row(part, observations[part.agent], TRUNCATED if cut_off[part.agent] else TERMINATED, call)
            if part.standing:
                unanswered.append(part)
            elif part.acted:
                rows.append((part, row))
        for part in [*unanswered, *(part for part, _ in rows)]:
            part.closed = _LEFT
        self._send_all(rows)
        for part in unanswered:
            self.refuse(part.lane, ServingError("the episode has ended"))
        self.inbox.put_all(unanswered)  # entries beyond their rows: there the sampling thread cuts them short

    def _truncation_flags(self, parts: Sequence[AgentPart], truncated: Any, call: str) -> dict[Hashable, bool]:
        if not isinstance(truncated, Mapping):
            truncated = {part.agent: truncated for part in parts}
        for agent, flag in truncated.items():
            self._index_of(agent, call)
            if not isinstance(flag, (bool, np.bool_)):
                raise ServingError(f"{call}: truncated of agent {agent!r} must be a bool, got {_kind(flag)}")
        return {part.agent: bool(truncated.get(part.agent, False)) for part in parts}

    # ------------------------------------------------------------------ rows on their way

    def _row(self, part: AgentPart, obs: Any, kind: int, call: str) -> QueuedRow:
        return QueuedRow(self.lanes.obs_copy(obs, _of(call, part)), part.reward, kind, None, math.nan, part.info)

    def _send_all(self, rows: Sequence[tuple[AgentPart, QueuedRow]]) -> None:
        """Sends checked rows together. The caller holds the episode's mutex."""
        for part, row in rows:
            if not part.acted:
                part.shared.parts[part.index] = self.by_lane[part.lane] = part
                part.shared.lanes_out += 1
            if part.sent == part.taken:
                self.lanes.write_queued(part.lane, row)
                part.in_place = part.sent
            else:
                part.backlog.append(row)
            if row.kind == ASKED:
                part.standing = True
                self.asking[part.lane] = part
            part.acted = True
            part.reward, part.info = 0.0, None
            part.sent += 1
        self.inbox.put_all([part for part, _ in rows])

    # ------------------------------------------------------------------ checks

    def _parts(self, shared: SharedEpisode, values: Mapping[Hashable, Any], call: str) -> list[AgentPart]:
        """The parts of the agents that a call names; an agent's first is new, and joins when it sends a row."""
        self._require_by_agent(values, call, "the first argument")
        if shared.closed is not None:
            raise gone(shared)
        self.registry.require_not_over()
        parts = []
        for agent in values:
            index = self._index_of(agent, call)
            part = shared.parts.get(index)
            if part is None:
                part = AgentPart(shared, agent, index, shared.lane * self.lanes_per_episode + index)
            elif part.closed is not None:
                raise gone(part)
            elif part.in_call:
                raise in_use(part)
            parts.append(part)
        shared.touched = True
        return parts

    def _idle_parts(self, shared: SharedEpisode, values: Mapping[Hashable, Any], call: str) -> list[AgentPart]:
        parts = self._parts(shared, values, call)
        for part in parts:
            if part.standing:
                raise question_stands(part)
        return parts

    def _index_of(self, agent: Any, call: str) -> int:
        try:
            return self._index[agent]
        except (KeyError, TypeError):
            raise ServingError(f"{call}: {unknown_name('agent', str(agent), map(str, self.agents))}") from None

    def _require_by_agent(self, values: Any, call: str, what: str) -> None:
        if not isinstance(values, Mapping):
            raise ServingError(
                f"{call}: {what} must be a dict by agent, got {_kind(values)}; the episode_id comes last: "
                "get_action({agent: obs}, episode_id), log_action({agent: obs}, {agent: action}, episode_id), "
                "log_returns({agent: reward}, infos, episode_id), end_episode({agent: obs}, episode_id)"
            )


def _of(call: str, part: AgentPart) -> str:
    return f"{call}: agent {part.agent!r}"


def _names(agents: Any) -> str:
    return ", ".join(repr(agent) for agent in agents) or "nobody"


def _kind(value: Any) -> str:
    return type(value).__name__
