"""The calls on episodes, from checked bodies to the served env and back."""

from __future__ import annotations

import asyncio
import collections
import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any

from rlsample.env.serving import ServingEnv
from rlsample.env.serving.lane_rows import MAX_REWARD
from rlsample.errors import ServingError, SpaceError
from rlsample.serving.http_errors import HttpError
from rlsample.serving.open_episode import Done, OpenEpisode, Waiter
from rlsample.serving.serving_metrics import ServingMetrics
from rlsample.serving.space_codec import SpaceCodec, stack_actions
from rlsample.serving.wire import WireError

__all__ = ["LONG_TURN_S", "EpisodeCalls"]

_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")
LONG_TURN_S = 0.005  # the loop takes no requests meanwhile
_SOON_S = 0.001
_PLACE_S = 1.0
_MOST_LONG_TURNS = 4  # in a row, that count: after one there are 3 turns elsewhere, after all 255
_ENDED = 1024  # latest ended episodes whose answers are kept for a retry


class EpisodeCalls:
    """Start, action, log_action, returns, end and actions; used by the server's loop only.

    A call that raises HttpError has booked nothing, but for ``policy_failed``.

    Args:
        env: the served env.
        version: the number of the policy's current weights.
        recording: whether rows of episodes may be kept.
        max_pending: most requests that wait.
    """

    def __init__(
        self,
        env: ServingEnv,
        codec: SpaceCodec,
        metrics: ServingMetrics,
        version: Callable[[], int],
        recording: bool,
        max_pending: int,
    ) -> None:
        self.env, self.codec, self.metrics = env, codec, metrics
        self.desk, self._registry = env.desk, env.desk.registry
        self._version, self._recording, self._max_pending = version, recording, max_pending
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # set by start()
        self.open: dict[str, OpenEpisode] = {}
        self.ended: collections.OrderedDict[str, OpenEpisode] = collections.OrderedDict()
        self.waiting: set[Waiter] = set()
        self.closed = False
        self._mail: collections.deque[tuple[Waiter, int, Any, int]] = collections.deque()
        self._mail_announced = False
        self._turn_comes = False
        self._turns_elsewhere = self._long_turns = 0

    # ------------------------------------------------------------------ the calls

    async def start(self, call: Any) -> str:
        """Opens an episode and returns its id. Waits a moment for a place that an ended episode is about to leave."""
        wanted = call.episode_id
        if wanted is not None:
            if not _ID.fullmatch(wanted) or wanted in (".", ".."):
                raise HttpError("bad_value", "an episode_id has 1 to 128 characters of A-Z a-z 0-9 . _ ~ -")
            if wanted in self._registry.open:
                raise HttpError("conflict", f"episode {wanted!r} is open already: end it first")
        recorded = call.training_enabled and self._recording
        deadline = time.monotonic() + _PLACE_S
        while True:
            self._require_serving()
            try:
                served = self._registry.start(wanted, recorded, 0.0)
                break
            except ServingError as e:
                self._require_serving()
                full = len(self._registry.open) >= self._registry.max_concurrent
                if full or wanted in self._registry.open or time.monotonic() > deadline:
                    raise HttpError("busy", str(e)) from None
            await asyncio.sleep(_SOON_S)
        self._forget(served.id)
        self.open[served.id] = OpenEpisode(served)
        return served.id

    def find(self, episode_id: str) -> OpenEpisode:
        """The open episode of that id."""
        episode = self.open.get(episode_id)
        if episode is not None and episode.served.closed is None:
            return episode
        self._require_serving()
        if episode is not None:
            self._move_to_ended(episode)
            raise HttpError("unknown_episode", f"episode {episode_id!r} {episode.served.closed}")
        try:
            self._registry.find(episode_id)
            message = f"episode {episode_id!r} was not started over HTTP"
        except ServingError as e:
            message = str(e)
        raise HttpError("unknown_episode", message)

    def ask(self, episode: OpenEpisode, call: Any, done: Done) -> Waiter:
        """Poses the question of an action call. When ``done`` is done, :meth:`settle` what this returns."""
        self.require_turn(episode, call.t)
        self._require_room()
        obs = self.checked(self.codec.obs, call.obs)
        if call.reward is not None:
            self.add_reward(episode, call.reward)
        return self._pose([episode], [obs], done)

    def ask_many(self, call: Any) -> Waiter:
        """Poses the questions of a batched call, all or none. Await ``done`` of what it returns, then settle it."""
        ids, rewards = call.episode_ids, call.rewards
        if not ids or len(set(ids)) != len(ids):
            raise HttpError("bad_value", f"episode_ids must be distinct and at least one, got {len(ids)} of them")
        if rewards is not None and len(rewards) != len(ids):
            raise HttpError("bad_value", f"{len(rewards)} rewards came for {len(ids)} episodes")
        self._require_room()
        episodes = [self.find(episode_id) for episode_id in ids]
        for episode in episodes:
            self.require_turn(episode, None)
            self.keep_open(episode)
        rows = self.codec.rows_of(self.checked(self.codec.obs_batch, call.obs, len(ids)))
        if rewards is not None:
            for episode, reward in zip(episodes, rewards, strict=True):
                self._require_reward(episode, reward)
            for episode, reward in zip(episodes, rewards, strict=True):
                self.add_reward(episode, reward)
        return self._pose(episodes, rows, self.loop.create_future())

    def log_action(self, episode: OpenEpisode, call: Any) -> None:
        """Books an action chosen elsewhere."""
        self.require_turn(episode, call.t)
        self.require_queue_room(episode, 1)
        obs = self.checked(self.codec.obs, call.obs)
        action = self.checked(self.codec.action, call.action)
        if call.action_logp is not None and not math.isfinite(call.action_logp):
            raise HttpError("bad_value", f"action_logp is {call.action_logp}; leave it out where it is unknown")
        if call.reward is not None:
            self.add_reward(episode, call.reward)
        self.log_checked(episode, obs, action, call.action_logp)

    def returns(self, episode: OpenEpisode, call: Any) -> None:
        """Books a reward."""
        self.require_turn(episode, call.t)
        self.add_reward(episode, call.reward, call.info)

    def end(self, episode: OpenEpisode, call: Any) -> None:
        """Ends an episode. Cut off, it may end before an action that it asked for and did not carry out."""
        if call.truncated and episode.asked and (call.t == episode.t - 1 or (call.t is None and episode.busy)):
            self._require_serving()
            self.checked(self.codec.obs, call.obs)
            self.desk.abandon(episode.served, "has ended")
            self._move_to_ended(episode)
            if episode.t > 1:
                self.metrics.episode_ended(episode.total)
            return
        self.require_turn(episode, call.t)
        obs = self.checked(self.codec.obs, call.obs)
        if call.reward is not None:
            self.add_reward(episode, call.reward)
        self.end_checked(episode, obs, call.truncated)

    # ------------------------------------------------------------------ their parts, with values that were checked

    def log_checked(self, episode: OpenEpisode, obs: Any, action: Any, logp: float | None) -> None:
        """Books an action; there is room for it."""
        self._desk_call(self.desk.log, episode.served, obs, action, logp)
        episode.t += 1
        episode.asked = False
        self._count_rows(episode, 1)

    def add_reward(self, episode: OpenEpisode, reward: float, info: dict[str, Any] | None = None) -> None:
        """Books a reward."""
        counts = episode.served.acted
        self._desk_call(self.desk.add_reward, episode.served, reward, info)
        if counts:
            episode.total += reward

    def end_checked(self, episode: OpenEpisode, obs: Any, truncated: bool) -> None:
        """Ends an episode."""
        self._desk_call(self.desk.end, episode.served, obs, truncated)
        self._move_to_ended(episode)
        if episode.t:
            self.metrics.episode_ended(episode.total)

    def policy_version(self) -> int:
        """The number of the current weights."""
        return self._version()

    def require_turn(self, episode: OpenEpisode, t: int | None) -> None:
        """Raises HttpError while the episode waits for an action, or if ``t`` is not where it stands."""
        self._require_serving()
        if episode.busy:
            raise HttpError("conflict", f"episode {episode.served.id!r} waits for an action: one call at a time")
        if t is not None and t != episode.t:
            raise HttpError("conflict", f"t is {t}, but episode {episode.served.id!r} is at {episode.t}")

    def keep_open(self, episode: OpenEpisode) -> None:
        """Sees to it that the episode does not expire in the middle of a call with several parts."""
        self._desk_call(self.desk.keep_open, episode.served)

    def require_queue_room(self, episode: OpenEpisode, rows: int) -> None:
        """Raises HttpError unless so many rows of the episode may queue up now."""
        served, limit = episode.served, self.env.settings.max_queued_rows
        if rows > limit:
            raise HttpError("bad_value", f"{rows} rows came at once, at most {limit} may")
        if served.sent - served.taken + rows > limit:
            raise HttpError("busy", f"{limit} rows of episode {served.id!r} wait to be sampled: send more later")

    # ------------------------------------------------------------------ answers

    def _pose(self, episodes: list[OpenEpisode], rows: list[Any], done: Done) -> Waiter:
        waiter = Waiter(episodes, done, time.perf_counter())
        self.waiting.add(waiter)
        for index, (episode, obs) in enumerate(zip(episodes, rows, strict=True)):
            try:
                self.desk.ask_later(episode.served, obs, functools.partial(self._mail_in, waiter, index), False)
            except ServingError as e:  # closed between the checks and here
                self._mail_in(waiter, index, e)
                continue
            episode.busy = episode.asked = True
            episode.t += 1
        if not self._turn_comes:
            self._turn_comes = True
            self.loop.call_soon(self._turn)  # after the other requests that have arrived by now
        return waiter

    def _turn(self) -> None:
        """Has everything answered that has been asked. A policy that takes long does it in the sampling thread."""
        self._turn_comes = False
        if self._turns_elsewhere:
            self._turns_elsewhere -= 1
            self.desk.inbox.ring()
            return
        started = time.perf_counter()
        self._mail_announced = True  # answers that come now are delivered here
        try:
            done = self.desk.answer_now()
        finally:
            self._deliver()
        if not done:
            self._turn_comes = True
            self.loop.call_later(_SOON_S, self._turn)
        else:
            took_long = time.perf_counter() - started > LONG_TURN_S
            self._long_turns = min(self._long_turns + 1, _MOST_LONG_TURNS) if took_long else 0
            self._turns_elsewhere = 4**self._long_turns - 1

    def settle(self, waiter: Waiter) -> list[Any]:
        """The actions of a request whose ``done`` is done.

        Raises:
            HttpError: ``policy_failed``, or ``closed``.
        """
        self.metrics.answered(time.perf_counter() - waiter.started, len(waiter.actions))
        for episode in waiter.episodes:
            self._count_rows(episode, 1)
        return waiter.actions

    def stacked(self, actions: list[Any]) -> Any:
        """K actions as columns."""
        return stack_actions(self.codec.action_space, actions)

    def _mail_in(self, waiter: Waiter, index: int, answer: Any) -> None:
        """Takes an answer in the sampling thread; the loop is woken once for all that come together."""
        self._mail.append((waiter, index, answer, self._version()))
        if not self._mail_announced:
            self._mail_announced = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._mail.clear()

    def _deliver(self) -> None:
        self._mail_announced = False
        mail = self._mail
        while mail:
            waiter, index, answer, version = mail.popleft()
            waiter.episodes[index].busy = False
            waiter.version = version
            waiter.left -= 1
            if isinstance(answer, ServingError):
                waiter.error = answer
            else:
                waiter.actions[index] = answer
            if not waiter.left:
                self.waiting.discard(waiter)
                if not waiter.done.done():
                    if waiter.error is None:
                        waiter.done.set_result(None)
                    else:
                        self._fail(waiter, waiter.error)

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        cause = error.__cause__
        if cause is None or isinstance(cause, ServingError):
            failed = HttpError("closed" if self._registry.stopped else "unknown_episode", str(error))
        else:
            failed = HttpError("policy_failed", f"{error}; the episode is closed")
            for episode in waiter.episodes:  # others of the request may have an action that nobody will hear of
                self._abandon(episode, failed.message)
        waiter.done.set_exception(failed)

    # ------------------------------------------------------------------ the end of waiting

    def tick(self, limit_s: float) -> None:
        """Once in a while: gives up requests that wait for longer, and forgets episodes that expired."""
        now = time.perf_counter()
        for waiter in [w for w in self.waiting if now - w.started > limit_s]:
            self._give_up(
                waiter,
                HttpError("busy", f"no action came in {limit_s} s, so the episode was closed; is anyone sampling?"),
            )
        for episode in [e for e in self.open.values() if e.served.closed is not None]:
            self._move_to_ended(episode)

    def close(self, reason: str) -> None:
        """Refuses everything from now on; whoever waits is told. Open episodes break off."""
        self.closed = True
        for waiter in list(self.waiting):
            self._give_up(waiter, HttpError("closed", reason))
        for episode in list(self.open.values()):
            self._abandon(episode, reason)

    def _give_up(self, waiter: Waiter, error: HttpError) -> None:
        self.waiting.discard(waiter)
        if not waiter.done.done():
            waiter.done.set_exception(error)
        for episode in waiter.episodes:
            self._abandon(episode, error.message)

    def _abandon(self, episode: OpenEpisode, reason: str) -> None:
        if episode.served.closed is None and not self._registry.stopped:
            self.desk.abandon(episode.served, f"was closed: {reason}")
        self._move_to_ended(episode)

    # ------------------------------------------------------------------ parts

    def _require_serving(self) -> None:
        if self.closed:
            raise HttpError("closed", "the server is shutting down")
        if self._registry.stopped:
            raise HttpError("closed", str(self._registry.over_error()))

    def _require_room(self) -> None:
        self._require_serving()
        if len(self.waiting) >= self._max_pending:
            raise HttpError("busy", f"{len(self.waiting)} requests wait for an action: ask again later")

    def checked(self, check: Callable[..., Any], *values: Any) -> Any:
        """What the codec makes of values; what it refuses is a HttpError."""
        try:
            return check(*values)
        except (SpaceError, WireError) as e:
            raise HttpError("bad_value", str(e)) from None

    def _require_reward(self, episode: OpenEpisode, reward: float) -> None:
        total = episode.served.reward + reward
        if not -MAX_REWARD <= total <= MAX_REWARD:
            raise HttpError("bad_value", f"a reward of {reward} makes {total}, which is no finite float32")

    def _desk_call(self, call: Callable[..., Any], episode: Any, *values: Any) -> Any:
        try:
            return call(episode, *values)
        except SpaceError as e:
            raise HttpError("bad_value", str(e)) from None
        except ServingError as e:
            self._require_serving()
            if episode.closed is not None:
                raise HttpError("unknown_episode", str(e)) from None
            if episode.mutex.locked() or episode.standing:
                raise HttpError("conflict", str(e)) from None
            raise HttpError("bad_value", str(e)) from None

    def _count_rows(self, episode: OpenEpisode, rows: int) -> None:
        if episode.served.training_enabled:
            self.metrics.rows += rows

    def _move_to_ended(self, episode: OpenEpisode) -> None:
        if self.open.pop(episode.served.id, None) is not None:
            self.ended[episode.served.id] = episode
            self.ended.move_to_end(episode.served.id)  # an id may be used again
            if len(self.ended) > _ENDED:
                self.ended.popitem(last=False)

    def _forget(self, episode_id: str) -> None:
        self.open.pop(episode_id, None)
