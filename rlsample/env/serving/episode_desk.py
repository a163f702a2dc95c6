"""Where clients and the sampling thread meet: rows on the way in, answers on the way out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.serving.answer_desk import AnswerDesk
from rlsample.env.serving.episode_errors import gone, in_use, no_answer, question_stands, refused
from rlsample.env.serving.episode_registry import CALL_ORDER, EpisodeRegistry
from rlsample.env.serving.inbox import Inbox
from rlsample.env.serving.lane_rows import MAX_REWARD, LaneRows, checked_logp, checked_reward
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
from rlsample.errors import ServingError
from rlsample.tree import Tree

__all__ = ["EpisodeDesk"]

_LOOK_S = 10.0


class EpisodeDesk(AnswerDesk):
    """The calls on served episodes. Each may come from any thread, but an episode takes one at a time.

    A row lies in its lane's place in ``lanes`` until the sampling thread has taken it; the ones that come meanwhile
    queue up behind it in the episode. A call that raises has sent nothing.

    Attributes:
        registry: the open episodes.
        by_lane: the episode in each lane, also after its end; None: the lane is free.
        lanes: the rows in place.
        inbox: an entry per row on its way.
        crowded: clients that wait for room in their episode's queue.
        looked_at: the episode whose mutex the sampling thread holds, or is about to take or has just let go of.
    """

    lanes_per_episode = 1
    agents: Sequence[Hashable] | None = None  # of several in an episode, who they are

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        max_concurrent: int,
        settings: ServingSettings,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.registry = self._make_registry(max_concurrent)
        num_lanes = self.registry.max_concurrent * self.lanes_per_episode
        self.by_lane: list[ServedEpisode | None] = self._make_lanes(num_lanes)
        self.lanes = LaneRows(observation_space, action_space, num_lanes, settings.allow_nonfinite)
        self.inbox = Inbox()
        self._limit_s = wait_limit(settings.timeout_s)
        self.crowded = 0
        self.looked_at: ServedEpisode | None = None
        self._room_lock = threading.Lock()  # used by itself: see EpisodeRegistry
        self._room = threading.Condition(self._room_lock)
        self._shape, self._dtype = self.lanes.plain
        self._obs, self._rewards = self.lanes.obs, self.lanes.rewards
        self._is_finite = self.lanes.quick_finite_check()

    # ------------------------------------------------------------------ episodes and their lanes

    def _make_registry(self, max_concurrent: int) -> EpisodeRegistry[Any]:
        return EpisodeRegistry(max_concurrent, self.settings.when_full, ServedEpisode)

    def _make_lanes(self, num_lanes: int) -> list[ServedEpisode | None]:
        return self.registry.by_lane

    def break_off(self, episode: Any, reason: str) -> Sequence[ServedEpisode]:
        """Closes an episode, for the sampling thread; returns what has to be cut short."""
        self.registry.close(episode, reason)
        return (episode,)

    def free_lane(self, lane: int) -> None:
        """The lane of a closed episode may be used again."""
        self.registry.free_lane(lane)

    # ------------------------------------------------------------------ the calls on one episode

    def ask(self, episode: ServedEpisode, obs: Any, timeout_s: float | None) -> Any:
        """Waits for the action of an observation; see :meth:`ServingEnv.get_action`."""
        limit_s = self._limit_s if timeout_s is None else wait_limit(timeout_s)
        if not episode.mutex.acquire(False):
            self._await_mutex(episode)
        try:
            episode.waiting = True
            if episode.standing:
                self._require_same(episode, obs)
            else:
                self._pose(episode, obs, self.inbox.put_and_work)
            if not episode.answered.acquire(True, limit_s):
                raise no_answer(episode, limit_s)
            episode.standing = False
            answer = episode.answer
            if answer.__class__ is Refusal:
                raise refused(episode, answer)
            return answer
        finally:
            episode.waiting = False
            if self.answered:
                self.pass_on()
            episode.mutex.release()

    def ask_later(
        self, episode: ServedEpisode, obs: Any, on_answer: Callable[[Any], None], at_once: bool = True
    ) -> None:
        """Poses the question and returns; see :meth:`ServingEnv.request_action`.

        Args:
            at_once: False: nobody is woken for it before :meth:`answer_now`.
        """
        if not episode.mutex.acquire(False):
            self._await_mutex(episode)
        try:
            if episode.standing:
                raise question_stands(episode)
            episode.on_answer = on_answer
            try:
                self._pose(episode, obs, self.inbox.put if at_once else self.inbox.ready.append)
            except BaseException:
                episode.on_answer = None
                raise
        finally:
            episode.mutex.release()

    def answer_now(self) -> bool:
        """Answers the questions that were posed with ``at_once=False``, if the sampling thread is parked.

        Returns:
            False: it is awake, and may take them itself: call again within a millisecond or so.
        """
        return self.inbox.work_now()

    def log(self, episode: ServedEpisode, obs: Any, action: Any, logp: Any) -> None:
        """Queues a row that brings its action; see :meth:`ServingEnv.log_action`."""
        column = self.lanes.action_copy(action, obs, "log_action")
        given = math.nan if logp is None else checked_logp(logp)
        self._await_room(episode)
        if not episode.mutex.acquire(False):
            self._await_mutex(episode)
        try:
            self._require_idle(episode)
            row = self._write(episode, obs, LOGGED, "log_action", column, given)
            episode.acted = True
            self._send(episode, row)
        finally:
            episode.mutex.release()

    def add_reward(self, episode: ServedEpisode, reward: Any, info: Any) -> None:
        """Credits the episode's last action; see :meth:`ServingEnv.log_returns`."""
        if reward.__class__ is not float:
            reward = checked_reward(reward)
        if info is not None and not isinstance(info, dict):
            raise ServingError(f"log_returns: info must be a dict, got {type(info).__name__}; {CALL_ORDER}")
        if not episode.mutex.acquire(False):
            self._await_mutex(episode)
        try:
            if episode.closed is not None or episode.standing or self.registry.stopped:
                self._require_idle(episode)
            total = episode.reward + reward
            if not -MAX_REWARD <= total <= MAX_REWARD:
                raise ServingError(f"log_returns: a reward of {reward} makes {total}, which is no finite float32")
            episode.touched = True
            if episode.acted:
                episode.reward = total
                if info:
                    episode.info = info
        finally:
            episode.mutex.release()

    def end(self, episode: ServedEpisode, obs: Any, truncated: bool) -> None:
        """Queues the final row; see :meth:`ServingEnv.end_episode`."""
        if not isinstance(truncated, (bool, np.bool_)):
            raise ServingError(f"end_episode: truncated must be a bool, got {type(truncated).__name__}; {CALL_ORDER}")
        if not episode.mutex.acquire(False):
            self._await_mutex(episode)
        try:
            self._require_open(episode)
            if not episode.acted:
                self.lanes.obs_copy(obs, "end_episode")
                self.registry.close(episode, "has ended")
                self.registry.free_lane(episode.lane)
            elif episode.standing:
                self.lanes.obs_copy(obs, "end_episode")
                self.registry.close(episode, "has ended")
                self.refuse(episode.lane, ServingError("the episode has ended"))
                self.inbox.put(episode)  # an entry beyond its rows: there the sampling thread cuts it short
            else:
                row = self._write(episode, obs, TRUNCATED if truncated else TERMINATED, "end_episode")
                self.registry.close(episode, "has ended")  # first: its lane may be free again right after
                self._send(episode, row)
        finally:
            episode.mutex.release()

    def abandon(self, episode: ServedEpisode, reason: str) -> None:
        """Closes an episode that nobody will end: it breaks off as an idle one does. Not during another call on it."""
        with episode.mutex:
            if episode.closed is not None:
                return
            self.registry.close(episode, reason)
            self.refuse(episode.lane, ServingError(f"the episode {reason}"))
            self.inbox.put(episode)  # an entry beyond its rows: there the sampling thread cuts it short

    # ------------------------------------------------------------------ rows on their way

    def _pose(self, episode: ServedEpisode, obs: Any, put: Callable[[ServedEpisode], None]) -> None:
        """Sends the row of a question. The caller holds the mutex, and no question stands."""
        if episode.closed is not None:
            raise gone(episode)
        lane = episode.lane
        if (
            type(obs) is np.ndarray
            and obs.dtype == self._dtype
            and obs.shape == self._shape
            and episode.sent == episode.taken
            and self._is_finite(obs)
        ):
            self._obs[lane] = obs
            self._rewards[lane] = episode.reward
            if episode.info is not None:
                self.lanes.infos[lane] = episode.info
                episode.info = None
            episode.in_place = episode.sent
        else:
            row = self._write(episode, obs, ASKED, "get_action")
            if row is not None:
                episode.backlog.append(row)
            episode.info = None
        episode.reward = 0.0
        episode.acted = episode.standing = episode.touched = True
        self.asking[lane] = episode
        episode.sent += 1
        put(episode)
        if self.registry.stopped and self.asking.pop(lane, None) is not None:
            raise self.registry.over_error()  # nobody will answer any more

    def _write(
        self,
        episode: ServedEpisode,
        obs: Any,
        kind: int,
        call: str,
        action: Tree = None,
        logp: float = math.nan,
    ) -> QueuedRow | None:
        """Checks a row; writes it in place, or returns it if the place is taken. Not sent yet."""
        lanes, lane = self.lanes, episode.lane
        if episode.sent != episode.taken:
            return QueuedRow(lanes.obs_copy(obs, call), episode.reward, kind, action, logp, episode.info)
        lanes.write_obs(lane, obs, call)
        lanes.write_outcome(lane, episode.reward, episode.info)
        if kind != ASKED:
            lanes.write_kind(lane, kind, action, logp)
        episode.in_place = episode.sent
        return None

    def _send(self, episode: ServedEpisode, row: QueuedRow | None) -> None:
        if row is not None:
            episode.backlog.append(row)
        episode.reward, episode.info = 0.0, None
        episode.touched = True
        episode.sent += 1
        self.inbox.put(episode)

    def _await_room(self, episode: ServedEpisode) -> None:
        limit, timeout_s = self.settings.max_queued_rows, self._limit_s

        def room() -> bool:
            queued = episode.sent - episode.taken
            return queued < limit or episode.closed is not None or self.registry.stopped

        if room():
            return
        with self._room_lock:
            self.crowded += 1
            try:
                if not self._room.wait_for(room, timeout_s):
                    raise ServingError(
                        f"log_action: {limit} rows of episode {episode.id!r} wait to be sampled, for {timeout_s} s now"
                    )
            finally:
                self.crowded -= 1

    # ------------------------------------------------------------------ room and the end of it

    def make_room(self) -> None:
        """Wakes the clients that wait for room; for the sampling thread, if ``crowded``."""
        with self._room_lock:
            self._room.notify_all()

    def stop(self, reason: str, cause: BaseException | None = None) -> None:
        """Takes no more calls: each, and those that wait now, raises ServingError with this reason. Idempotent."""
        self.registry.stop(reason, cause)
        for lane in list(self.asking):
            self.refuse(lane, self.registry.over_error())
        self.wake_all()
        self.inbox.ring()
        self.make_room()

    # ------------------------------------------------------------------ checks

    def keep_open(self, episode: ServedEpisode) -> None:
        """Sees to it that the episode does not expire before calls that follow at once.

        Raises:
            ServingError: it takes no more calls, or another one is going on.
        """
        if not episode.mutex.acquire(False):
            self._await_mutex(episode)
        try:
            self._require_open(episode)
            episode.touched = True
        finally:
            episode.mutex.release()

    def _await_mutex(self, episode: ServedEpisode) -> None:
        """Takes the mutex that was found taken: by the sampling thread, which is soon done, or by another call."""
        soon = self.looked_at is episode  # if it has just ended, the mutex is free
        if not episode.mutex.acquire(True, _LOOK_S if soon else 0.0):
            raise in_use(episode)

    def _require_open(self, episode: ServedEpisode) -> None:
        if episode.closed is not None:
            raise gone(episode)
        self.registry.require_not_over()

    def _require_idle(self, episode: ServedEpisode) -> None:
        self._require_open(episode)
        if episode.standing:
            raise question_stands(episode)

    def _require_same(self, episode: ServedEpisode, obs: Any) -> None:
        """Raises ServingError unless ``obs`` is the one that the standing question is about."""
        self._require_open(episode)
        column = self.lanes.obs_copy(obs, "get_action")
        try:
            same = self.lanes.same(episode.backlog[-1].obs, column)
        except IndexError:
            same = self.lanes.holds(episode.lane, column)
        if not same:
            raise question_stands(episode)
