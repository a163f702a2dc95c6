"""A ServingEnv behind the polled interface: a slot per served episode."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.serving.agent_desk import AgentDesk
from rlsample.env.serving.batch_gate import BatchGate
from rlsample.env.serving.served_episode import (
    ASKED,
    LOGGED,
    TERMINATED,
    TRUNCATED,
    EpisodeCutError,
    LoggedActions,
    ServedEpisode,
    ServingEnded,
)
from rlsample.env.serving.serving_env import ServingEnv
from rlsample.env.serving.shared_episode import SharedEpisode
from rlsample.env.slot_states import BUSY, ENDED, FAILED, NEW, RESETTING, WAITING, SlotStates
from rlsample.env.spaces import ActionCodec
from rlsample.errors import ConfigError, EnvClosedError, EnvProtocolError

__all__ = ["ServingEnvAdapter"]

_JOIN_S = 5.0
_LONGEST_WAIT_S = 3600.0  # a lock takes no infinite time
_EXPIRY_CHECKS = 4  # per idle_timeout_s
_HELD = (WAITING, ENDED, FAILED)  # states in which a slot's next row has to wait


class ServingEnvAdapter(BaseEnv):
    """Slots are lanes that served episodes come to and leave.

    What differs from other polled envs, because here the episodes decide:

    * A slot has no row before an episode takes it. try_reset frees a slot that ended and returns None: its next first
      row comes with the next episode, if there is one. A slot that has not ended cannot be reset.
    * poll waits for clients, so it raises for want of pending work only if every slot waits for an action or a reset.
    * ``off_policy_actions`` is a :class:`LoggedActions` where some row brought its action. It is sent an action like
      any other, which nobody gets.
    * An episode that breaks off shows in ``failures`` as :class:`EpisodeCutError`; try_restart frees its slot. There is
      no budget for it.

    Args:
        env: its thread is started by the first poll. One adapter per env.
        sample_lanes: a batch is counted as for that many slots: ``rollout_fragment_length * sample_lanes`` rows.

    Attributes:
        agents: the possible ones, where several play in an episode: slot ``place * lanes_per_episode + k`` is that of
            agent k in the episode at that place. Else None.
        unrecorded: bool[num_envs], slots whose episode has ``training_enabled=False``. Written by poll.
        num_unrecorded: how many those are.
        stats: counts since the start: answered, batches, expired.
    """

    steps_ahead = True

    def __init__(self, env: ServingEnv, sample_lanes: int = 1) -> None:
        if getattr(env, "_adapted", False):
            raise ConfigError(f"this {type(env).__name__} serves another evaluator; make one for each")
        env._adapted = True  # type: ignore[attr-defined]
        self.env, self.sample_lanes = env, sample_lanes
        self.observation_space, self.action_space = env.observation_space, env.action_space
        desk = self._desk = env.desk
        self.num_envs = len(desk.by_lane)
        self.agents, self.lanes_per_episode = desk.agents, desk.lanes_per_episode
        self.unrecorded = np.zeros(self.num_envs, bool)
        self.num_unrecorded = 0
        self.stats = {"answered": 0, "batches": 0, "expired": 0}
        settings = env.settings
        self._max_batch = settings.max_batch or self.num_envs
        self._gate = BatchGate(desk, self._max_batch, min(settings.max_wait_us * 1e-6, _LONGEST_WAIT_S))
        self._idle_timeout_s = settings.idle_timeout_s or np.inf
        self._states = SlotStates(self.num_envs)
        self._code = self._states.code
        self._num_held = 0  # slots that wait for an action or a reset, or failed
        self._codec = ActionCodec(env.action_space)
        self._deferred: list[ServedEpisode] = []
        self._cuts: dict[int, EpisodeCutError] = {}
        self._logged: set[int] = set()  # slots whose waiting row brought its action
        self._handed: np.ndarray | None = None  # slots of the last poll, all of which wait for an action
        self._no_flags = np.zeros(self.num_envs, bool)
        self._no_flags.flags.writeable = False
        self._next_check = np.inf if settings.idle_timeout_s is None else -np.inf
        self._running = self._closed = False

    # ------------------------------------------------------------------ poll

    def poll(self, timeout_s: float | None = None) -> StepBatch:
        """Rows of the episodes that asked, logged or ended: a micro-batch, as the settings say.

        Raises:
            ServingEnded: ``run()`` has ended and all it queued was handed over; its error is the cause.
            EnvClosedError: the env is closed, or was while this waited.
            EnvProtocolError: every slot waits for an action or a reset.
        """
        if not self._running and not self._closed:
            self._running = True
            if self.env.ident is None:
                self.env.start()
        deadline = np.inf if timeout_s is None else time.monotonic() + timeout_s
        episodes: list[ServedEpisode] = []
        self._handed = None
        while not episodes and not self._cuts:
            if not self._await_rows(deadline):
                break
            episodes = self._take()
        return self._step_batch(episodes)

    def _await_rows(self, deadline: float) -> bool:
        """Waits until a batch shall go; False: the time is up, or this thread was called to go on without rows."""
        inbox = self._desk.inbox
        now = self._expire_idle()
        self._require_not_closed()
        if self._cuts or (self._deferred and any(self._code[e.lane] not in _HELD for e in self._deferred)):
            return True
        expected = self._gate.expected()
        if expected > 1 and len(inbox.ready) < expected:
            self._gate.wait(expected)
        while not inbox.ready:
            self._require_not_closed()
            if self.env.over:
                self._raise_ended()
            now = self._expire_idle()
            if self._cuts:
                return True
            if now >= deadline:
                return False
            self._require_some_open()
            self._gate.wait_long(expected, min(deadline - now, self._next_check - now, _LONGEST_WAIT_S))
            if inbox.was_called():
                return False
        self._require_not_closed()
        return True

    def _require_not_closed(self) -> None:
        if self._closed:
            raise EnvClosedError("the served env is closed, or was closed while this waited")

    def let_clients_work(self, take_turn: Callable[[], None]) -> None:
        """While poll waits for a single client, that client's thread may call ``take_turn`` to have itself answered.

        Args:
            take_turn: polls with ``timeout_s=0`` and sends actions, as the thread would that waits in poll. What it
                raises is raised by that thread's poll. If it leaves slots waiting, that poll returns empty.
        """
        gate = self._gate
        self._desk.inbox.lend_turns(take_turn, lambda: not self._num_held and (gate.num_prompt <= 1 or gate.driven))

    def be_driven(self, driven: bool) -> None:
        """Says that one thread serves many clients, such as a server's loop.

        It asks by ``desk.ask_later(..., at_once=False)`` as often as it likes, then calls ``desk.answer_now()``, which
        answers in that thread, in one batch, while the sampling thread is parked. No batch waits for other clients.
        """
        self._gate.driven = driven

    def _require_some_open(self) -> None:
        code = self._states.code.tobytes()
        if not (BUSY in code or NEW in code or RESETTING in code):
            raise self._states.nothing_pending()

    def _raise_ended(self) -> None:
        if self._desk.inbox.ready:  # put just before it was over
            return
        over = self._desk.registry.over_error()
        raise ServingEnded(str(over)) from over.__cause__

    def _take(self) -> list[ServedEpisode]:
        """Episodes with a row in place, each in another slot."""
        ready = self._desk.inbox.ready
        popleft = ready.popleft
        episodes = [popleft() for _ in range(min(len(ready), self._max_batch))]
        if self._deferred:
            episodes = self._deferred + episodes
            self._deferred = []
        if self._num_held or len(set(episodes)) < len(episodes):
            episodes = self._first_of_each(episodes)
        for episode in episodes:
            if episode.in_place != episode.taken:
                episodes = self._first_of_each(episodes)  # a dead one may stand before the next of its slot
                return [e for e in episodes if self._bring_in_place(e)]
        return episodes

    def _first_of_each(self, episodes: list[ServedEpisode]) -> list[ServedEpisode]:
        """The entries that may be handed over now; the others are kept for later polls, in order."""
        taken: set[int] = set()
        first = []
        for episode in episodes:
            if episode.dead:
                continue
            if episode.lane in taken or self._code[episode.lane] in _HELD:
                self._deferred.append(episode)
            else:
                taken.add(episode.lane)
                first.append(episode)
        return first

    def _bring_in_place(self, episode: ServedEpisode) -> bool:
        """Whether the entry is a row, which then lies in its place."""
        if episode.taken == episode.sent:  # an end while its question stood: the entry beyond the rows
            self._cut(episode, "was ended while an answer was outstanding")
            return False
        if episode.in_place != episode.taken:
            self._desk.lanes.write_queued(episode.lane, episode.backlog[0])
            episode.in_place = episode.taken
            episode.backlog.popleft()
        return True

    def _step_batch(self, episodes: list[ServedEpisode]) -> StepBatch:
        rows = self._desk.lanes.take([episode.lane for episode in episodes])
        count, lanes, kinds = len(episodes), rows.lanes, rows.kinds
        new = [row for row, episode in enumerate(episodes) if not episode.begun]
        is_first = self._begin(episodes, new) if new else self._no_flags[:count]
        self._gate.came(episodes)
        for episode in episodes:
            episode.taken += 1  # from here on its client may write the next row in place
        if self._desk.crowded:
            self._desk.make_room()
        self._code[lanes] = WAITING
        self._num_held += count
        self.stats["batches"] += count > 0
        failures, self._cuts = self._cuts, {}
        terminated = truncated = self._no_flags[:count]
        logged = None
        if kinds is None:
            self._handed = lanes
        else:
            terminated, truncated = kinds == TERMINATED, kinds == TRUNCATED
            self._code[lanes[kinds >= TERMINATED]] = ENDED
            for row in np.flatnonzero(kinds != ASKED).tolist():
                self._gate.left(episodes[row])
        if kinds is not None and rows.logp is not None:
            logged = LoggedActions(kinds == LOGGED, rows.actions, rows.logp)
            self._logged.update(lanes[logged.mask].tolist())
        agents = None if self.agents is None else lanes % self.lanes_per_episode
        return StepBatch(
            lanes, rows.obs, rows.rewards, terminated, truncated, is_first, rows.infos, failures, agents, logged
        )

    def _begin(self, episodes: list[ServedEpisode], new: list[int]) -> np.ndarray:
        is_first = np.zeros(len(episodes), bool)
        is_first[new] = True
        for row in new:
            episode = episodes[row]
            episode.begun = True
            if not episode.training_enabled:
                self.unrecorded[episode.lane] = True
                self.num_unrecorded += 1
        return is_first

    # ------------------------------------------------------------------ answers

    def send_actions(self, env_ids: np.ndarray, actions: Any) -> None:
        """Hands each waiting client its action. Logged rows take theirs to nobody."""
        self._require_not_closed()
        if env_ids is not self._handed:
            env_ids = self._states.require_waiting(env_ids)
        answers = self._codec.check_and_split(actions, env_ids)
        self._handed = None
        self._code[env_ids] = BUSY
        self._num_held -= len(answers)
        lanes = env_ids.tolist()
        if self._logged:  # their client may wait already for a later row's answer
            asked = [k for k, lane in enumerate(lanes) if lane not in self._logged]
            self._logged.difference_update(lanes)
            lanes, answers = [lanes[k] for k in asked], [answers[k] for k in asked]
        self.stats["answered"] += len(lanes)
        self._desk.hand_over(lanes, answers)

    def refuse(self, env_ids: np.ndarray, error: BaseException) -> None:
        """Answers waiting slots with an error, as no action can be had: closes their episodes, which break off here.

        Raises:
            EnvProtocolError: a slot does not wait.
        """
        for lane in self._states.require_waiting(env_ids).tolist():
            episode = self._desk.looked_at = self.episode_in(lane)
            held = episode.hold(1.0)  # a client may be just sending
            broken = self._desk.break_off(episode, f"was closed, as no action could be had: {error}")
            for one in broken:
                self._cut(one, f"got no action: {type(error).__name__}: {error}")
            if held:
                episode.mutex.release()
            self._desk.looked_at = None
            for one in broken:
                self._desk.refuse(one.lane, error)
        self._handed = None

    def episode_in(self, slot: int) -> ServedEpisode:
        """The episode, or agent's part of one, in a slot that is not free."""
        episode = self._desk.by_lane[slot]
        assert episode is not None
        return episode

    def shared_finished(self) -> Iterator[SharedEpisode]:
        """Episodes of several agents that were ended and sampled, each given out once."""
        while isinstance(self._desk, AgentDesk) and self._desk.finished:
            yield self._desk.finished.popleft()

    def acted_lanes(self) -> np.ndarray:
        """int64[M]: slots that were sent an action whose outcome has not been polled."""
        return np.flatnonzero(self._states.code == BUSY)

    # ------------------------------------------------------------------ slots that come and go

    def try_reset(self, env_ids: np.ndarray) -> None:
        """Frees slots whose episode has ended; None: their next first rows come with new episodes.

        Raises:
            EnvProtocolError: a slot has not ended. Only its client can end a served episode.
        """
        ids = self._states.require_resettable(env_ids)
        going_on = ids[self._code[ids] != ENDED]
        if len(going_on):
            raise EnvProtocolError(f"slots {going_on.tolist()}: only its client can end a served episode")
        self._free(ids)

    def try_restart(self, env_ids: np.ndarray) -> None:
        """Frees slots whose episode broke off."""
        self._free(self._states.require_failed(env_ids))

    def _free(self, lanes: np.ndarray) -> None:
        self._code[lanes] = RESETTING
        self._num_held -= len(lanes)
        if self.num_unrecorded:
            self.num_unrecorded -= int(np.count_nonzero(self.unrecorded[lanes]))
            self.unrecorded[lanes] = False
        for lane in lanes.tolist():
            self._desk.free_lane(lane)

    def _cut(self, episode: ServedEpisode, what: str) -> None:
        """What is still on its way of a closed episode is dropped; its slot fails, or is free if it had no row."""
        episode.dead, episode.in_place = True, -1
        lane = episode.lane
        self._desk.lanes.clear(lane)
        self._logged.discard(lane)
        self._gate.left(episode)
        if not episode.begun:
            self._desk.free_lane(lane)
            return
        if self._code[lane] not in _HELD:
            self._num_held += 1
        self._code[lane] = FAILED
        self._cuts[lane] = EpisodeCutError(f"slot {lane}: episode {episode.id!r} {what}", slot=lane)

    def _expire_idle(self) -> float:
        """Closes episodes that had no call for too long, if it is time to look; returns the time."""
        now = time.monotonic()
        if now < self._next_check:
            return now
        self._next_check = now + self._idle_timeout_s / _EXPIRY_CHECKS
        for episode in list(self._desk.registry.open.values()):
            if episode.standing or episode.touched or episode.sent != episode.taken:
                episode.touched, episode.idle_since = False, now
            elif now - episode.idle_since >= self._idle_timeout_s:
                self._expire(episode)
        return now

    def _expire(self, episode: Any) -> None:
        self._desk.looked_at = episode
        if episode.mutex.acquire(False):
            try:
                if not episode.touched and episode.closed is None:  # no call came just now
                    for one in self._desk.break_off(episode, f"expired: it had no call for {self._idle_timeout_s} s"):
                        self._cut(one, f"had no call for {self._idle_timeout_s} s")
                    self.stats["expired"] += 1
            finally:
                episode.mutex.release()
        self._desk.looked_at = None

    # ------------------------------------------------------------------ the end

    def stop_serving(self, error: BaseException) -> None:
        """Sampling has failed for good: every client that waits, and every later call, is told why."""
        self._desk.stop(f"sampling has ended: {type(error).__name__}: {error}", error)

    def close(self) -> None:
        """Ends every call with a ServingError, then waits at most 5 s for ``run()`` to end."""
        first, self._closed = not self._closed, True
        self._desk.stop("the served env was closed")
        try:
            if first:
                self.env.interrupt()
        finally:
            if self.env.ident is not None and self.env is not threading.current_thread():
                self.env.join(_JOIN_S)
