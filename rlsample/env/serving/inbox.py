"""The way from client threads to the sampling thread: a queue, and a bell that rings once per batch."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading

from rlsample.env.serving.served_episode import ServedEpisode

__all__ = ["Inbox"]

_NEVER = sys.maxsize


class Inbox:
    """Episodes that have a row to sample, in the order they came. One thread waits and takes, any thread puts.

    The waiting thread says how many entries shall wake it. So K clients cost one wake-up and not K.
    """

    __slots__ = ("_bell", "ready", "target")

    def __init__(self) -> None:
        self.ready: collections.deque[ServedEpisode] = collections.deque()
        self.target = _NEVER
        self._bell = threading.Lock()
        self._bell.acquire()

    def put(self, episode: ServedEpisode) -> None:
        """Adds an entry and wakes the waiting thread if it is the last one that was waited for."""
        self.ready.append(episode)
        if len(self.ready) >= self.target:
            self.target = _NEVER  # the others need not ring too
            self.ring()

    def ring(self) -> None:
        """Wakes the thread that waits, or the next one that will."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def wait(self, entries: int, timeout_s: float) -> None:
        """Returns when there are so many entries, when rung, or after the time; may also return early."""
        self.target = entries
        if len(self.ready) < entries:  # after the target was set: whoever puts now, rings
            self._bell.acquire(True, timeout_s)
        self.target = _NEVER
