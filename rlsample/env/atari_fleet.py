"""Groups of Atari games under way: which comes back next, and how a wait ends."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
import time
from typing import Any

from rlsample.env.atari_group import AtariGroup
from rlsample.env.pool.broken_off import BeginsAnew
from rlsample.errors import EnvClosedError

__all__ = ["AtariFleet"]

_WAKE = None
_DIRECT_MOST = 256  # games per core: their step takes a fifth of a second


class AtariFleet:
    """Waits for groups that were sent off.

    One group is waited for inside ale-py, at no cost, where the caller sets no time limit and its games are not too
    many: they need but milliseconds, and cannot hang since actions are checked. Otherwise a thread per group waits, so
    that a wait can be limited and :meth:`close` can end it.

    Args:
        groups: opened, none of them under way.
        outcomes: the queue that the groups' threads fill.
        in_turn: groups come back in the order they were sent off; else as they are ready.
    """

    def __init__(self, groups: list[AtariGroup], outcomes: queue.SimpleQueue[Any], in_turn: bool) -> None:
        self.groups = groups
        self.closed = False
        self._outcomes, self._in_turn = outcomes, in_turn
        self._in_background = len(groups) > 1 or len(groups[0].ids) > _DIRECT_MOST * (os.cpu_count() or 1)
        self._arrived: collections.deque[Any] = collections.deque()
        self._sent: collections.deque[AtariGroup] = collections.deque()
        self._back: collections.deque[AtariGroup] = collections.deque()  # whose outcome is known, as they came

    def any_sent(self) -> bool:
        """Whether a group is under way."""
        return bool(self._sent)

    def launch(self, group: AtariGroup) -> None:
        """Sends a group off for a step."""
        group.launch(self._in_background)
        self._sent.append(group)

    def begin_reset(self, group: AtariGroup, rows: Any, seeds: Any = None) -> None:
        """Sends a group off for a reset of some of its games."""
        group.begin_reset(rows, seeds)
        self._sent.append(group)

    def next(self, deadline: float | None, caller: BeginsAnew) -> AtariGroup | None:
        """The next group; None: ``deadline`` (of ``time.monotonic``) has passed. One must be under way.

        While it only waits for threads, ``caller`` is idle.

        Raises:
            EnvClosedError: closed meanwhile.
        """
        head = self._sent[0]
        if not head.in_background:
            if deadline is None:
                head.receive()
                self._back.append(head)
                return self._taken(head)
            head.begin_receive()
        while True:
            if not self._in_turn and self._back:
                return self._taken(self._back[0])
            if self._in_turn and head.outcome is not None:
                return self._taken(head)
            caller.idle_in = threading.get_ident()
            there = self._wait(deadline)
            caller.idle_in = None
            if not there:
                return None
            self._collect()

    def wait_for(self, group: AtariGroup) -> None:
        """Waits for this group, which was sent off for a reset."""
        while group.outcome is None:
            self._wait(None)
            self._collect()
        self._taken(group)

    def _taken(self, group: AtariGroup) -> AtariGroup:
        self._back.remove(group)
        self._sent.remove(group)
        return group

    def _wait(self, deadline: float | None) -> bool:
        """Until there is an outcome; False: the time is over."""
        if self._arrived:  # the wait before was interrupted
            return True
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(queue.Empty):  # in one step, for Ctrl-C: an outcome is in one of the two
            self._arrived.extend(map(self._outcomes.get, (True,), (wait_s,)))
        return bool(self._arrived)

    def _collect(self) -> None:
        """Takes the outcomes that have arrived."""
        while self._arrived:
            outcome = self._arrived.popleft()
            if self.closed:
                raise EnvClosedError("the env was closed during this call")
            if outcome is not _WAKE:
                self.groups[outcome.tag].outcome = outcome
                self._back.append(self.groups[outcome.tag])

    def wake(self) -> None:
        """Ends a wait in another thread: with an error, if closed."""
        self._outcomes.put(_WAKE)

    def close(self, timeout_s: float) -> None:
        """Lets go of the games; waits so long for the threads to end."""
        self.closed = True
        deadline = time.monotonic() + timeout_s
        for group in self.groups:
            group.end()
        for group in self.groups:
            group.join(deadline - time.monotonic())
