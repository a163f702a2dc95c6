"""Which served episodes are open, under which id and in which lane."""

from __future__ import annotations

import collections
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from rlsample.env.serving.serving_settings import wait_limit
from rlsample.errors import ConfigError, ServingError

__all__ = ["CALL_ORDER", "EpisodeRegistry"]

_REMEMBERED = 64  # latest ends whose reason is kept for late calls
CALL_ORDER = (
    "the episode_id comes last: get_action(obs, episode_id), log_action(obs, action, episode_id), "
    "log_returns(reward, info, episode_id), end_episode(obs, episode_id)"
)


class _OpenEpisode(Protocol):
    id: str
    lane: int
    closed: str | None


E = TypeVar("E", bound=_OpenEpisode)


class EpisodeRegistry(Generic[E]):
    """Opens, finds and closes episodes; any thread may call any method.

    An episode occupies a lane from its start until the sampling thread has seen its end. Nothing is kept of a closed
    one but the reason of the latest few: the ids made here carry a counter, which tells finished from never started.

    Args:
        max_concurrent: lanes, and most open episodes.
        when_full: "block" or "error".
        make: (id, lane, training_enabled) -> what is opened.

    Attributes:
        open: id -> open episode.
        by_lane: the episode in each lane, also after its end; None: the lane is free.
        over: set when no more calls are taken; ``stopped`` says the same, faster.
    """

    def __init__(self, max_concurrent: int, when_full: str, make: Callable[[str, int, bool], E]) -> None:
        if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be an int of at least 1, got {max_concurrent!r}")
        self.max_concurrent = max_concurrent
        self.open: dict[str, E] = {}
        self.by_lane: list[E | None] = [None] * max_concurrent
        self._make = make
        self.over = threading.Event()
        self.stopped = False
        self._over_because: tuple[str, BaseException | None] = ("", None)
        self._wait_when_full = when_full == "block"
        self._free = list(range(max_concurrent - 1, -1, -1))  # the lane freed last is used first: few are half full
        self._lock = threading.Lock()  # used by itself: Ctrl-C may leave a Condition's own __exit__ before it unlocks
        self._changed = threading.Condition(self._lock)
        self._started = 0
        self._prefix = f"{secrets.token_hex(4)}-"  # an id of another run is not mistaken for one of this
        self._ends: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._mine = threading.local()

    # ------------------------------------------------------------------ opening and closing

    def start(self, episode_id: str | None, training_enabled: bool, timeout_s: float) -> E:
        """Opens an episode, as soon as there is a place.

        Raises:
            ServingError: the id is no non-empty str or is open already; no place in time, or none and ``when_full`` is
                "error"; serving is over.
        """
        if episode_id is not None and (not isinstance(episode_id, str) or not episode_id):
            raise ServingError(f"start_episode: an episode_id is a non-empty str, got {episode_id!r}")
        deadline = time.monotonic() + wait_limit(timeout_s)
        with self._lock:
            while not self._has_place(episode_id):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise ServingError(
                        f"start_episode: no place after {timeout_s} s: {len(self.open)} of {self.max_concurrent} "
                        "episodes are open; ended ones leave their place when they are sampled"
                    )
            self._started += 1
            while episode_id is None and f"{self._prefix}{self._started}" in self.open:  # somebody's own name for one
                self._started += 1
            lane = self._free.pop()
            episode = self._make(episode_id or f"{self._prefix}{self._started}", lane, bool(training_enabled))
            self.open[episode.id] = self.by_lane[lane] = episode
        self._add_own(episode)
        return episode

    def _has_place(self, episode_id: str | None) -> bool:
        self.require_not_over()
        if episode_id in self.open:
            raise ServingError(f"start_episode: episode {episode_id!r} is open already; end it first")
        if len(self.open) < self.max_concurrent:
            return bool(self._free)  # none: the sampling thread has not yet seen the last end, which it soon will
        if not self._wait_when_full:
            raise ServingError(f"start_episode: {len(self.open)} episodes are open, which is max_concurrent")
        return False

    def close(self, episode: E, reason: str) -> None:
        """The episode takes no more calls. Its lane stays taken until :meth:`free_lane`."""
        with self._lock:
            episode.closed = reason
            if self.open.get(episode.id) is episode:  # its id may have been used again
                del self.open[episode.id]
            if not (reason == "has ended" and episode.id.startswith(self._prefix)):
                self._ends[episode.id] = reason
                if len(self._ends) > _REMEMBERED:
                    self._ends.popitem(last=False)
            self._changed.notify()

    def free_lane(self, lane: int) -> None:
        """The lane of a closed episode may be used again."""
        with self._lock:
            self.by_lane[lane] = None
            self._free.append(lane)
            self._changed.notify()

    def stop(self, reason: str, cause: BaseException | None) -> None:
        """No episode can be started or found any more; those who wait for a place are told why. Idempotent."""
        with self._lock:
            if not self.stopped:
                self._over_because = (reason, cause)
                self.stopped = True
                self.over.set()
            self._changed.notify_all()

    # ------------------------------------------------------------------ finding

    def find(self, episode_id: str | None, first: Any = None) -> E:
        """The open episode of that id; without one, the only open episode that the calling thread started.

        Args:
            first: what the call was given first, to notice one that gives the id first.

        Raises:
            ServingError: there is no such episode; says whether it is finished, if that is known.
        """
        try:
            if episode_id is not None:
                return self.open[episode_id]
            episode: E
            (episode,) = self._mine.episodes
            if episode.closed is None:
                return episode
        except (KeyError, TypeError, AttributeError, ValueError):
            pass
        if episode_id is not None:
            raise self._no_episode(episode_id)
        if isinstance(first, str):
            raise ServingError(f"{first!r} came first; {CALL_ORDER}")
        return self._only()

    def _own(self) -> list[E]:
        """The open episodes that the calling thread started."""
        mine: list[E] = [e for e in getattr(self._mine, "episodes", ()) if e.closed is None]
        self._mine.episodes, self._mine.sweep_at = mine, 2 * len(mine) + 8
        return mine

    def _add_own(self, episode: E) -> None:
        mine: list[E] = getattr(self._mine, "episodes", [])
        if len(mine) < 8 or len(mine) >= self._mine.sweep_at:  # a server's thread may have thousands
            mine = self._own()
        mine.append(episode)

    def _only(self) -> E:
        self.require_not_over()
        closed = [e for e in getattr(self._mine, "episodes", ()) if e.closed is not None]
        mine = self._own()
        if len(mine) == 1:
            return mine[0]
        if not mine:
            last = f" (its last one, {closed[-1].id!r}, {closed[-1].closed})" if closed else ""
            raise ServingError(f"this thread has no open episode{last}: call start_episode, or pass an episode_id")
        ids = ", ".join(repr(e.id) for e in mine[:4]) + (", ..." if len(mine) > 4 else "")
        raise ServingError(f"this thread has {len(mine)} open episodes ({ids}): pass the episode_id of one")

    def _no_episode(self, episode_id: Any) -> ServingError:
        if not isinstance(episode_id, str):
            return ServingError(f"the episode_id must be a str, got {type(episode_id).__name__}; {CALL_ORDER}")
        if self.stopped:
            return self.over_error()
        if episode_id in self._ends:
            return ServingError(f"episode {episode_id!r} {self._ends[episode_id]}")
        number = episode_id.removeprefix(self._prefix)
        if number != episode_id and number.isdecimal() and 0 < int(number) <= self._started:
            return ServingError(f"episode {episode_id!r} has ended")
        return ServingError(f"there is no episode {episode_id!r}: it was never started here, or ended long ago")

    def require_not_over(self) -> None:
        """Raises the error of :meth:`over_error` after :meth:`stop`."""
        if self.stopped:
            raise self.over_error()

    def over_error(self) -> ServingError:
        """What a call is told after :meth:`stop`."""
        reason, cause = self._over_because
        error = ServingError(reason)
        error.__cause__ = cause
        return error
