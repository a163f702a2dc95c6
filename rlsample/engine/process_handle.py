"""What a process engine knows of one worker: its channel, and the calls it has not answered."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from rlsample.engine.call_future import CallFuture
from rlsample.engine.channel import CALL, Channel
from rlsample.engine.engine import Future, Handle
from rlsample.engine.failures import died
from rlsample.engine.shared_value import SharedValue

if TYPE_CHECKING:
    from rlsample.engine.process_engine import ProcessEngine

__all__ = ["ProcessHandle"]


class ProcessHandle(Handle):
    """See :class:`~rlsample.engine.engine.Handle`.

    Attributes:
        pid: of the worker's process; None until it has started.
    """

    def __init__(
        self, engine: ProcessEngine, key: int, index: int, incarnation: int, factory: bytes, sock: socket.socket
    ) -> None:
        self.engine, self.key, self.index, self.incarnation, self.factory = engine, key, index, incarnation, factory
        self.pid: int | None = None
        self.channel = Channel(sock, engine.pool)
        self.pending: dict[int, CallFuture] = {}
        self.refuses: str | None = None  # why calls fail from now on
        self.gone = False  # its channel is closed
        self.reading = False  # between readings: the last broke off, and nobody knows where the next message begins
        self.cut_off = False  # half a message was sent: nothing can follow
        self.build_failed = False
        self.close_error: Exception | None = None
        self.waited_for_since: float | None = None  # without a sign of life; None: nobody waits
        self.call_ids = itertools.count(1)
        self.lock = threading.Lock()  # guards pending and refuses together
        self.send_lock = threading.Lock()  # frames are made and sent in one order

    def call(self, name: str, *args: Any, tag: Any = None) -> Future:
        """See :meth:`Handle.call`. Blocks only while the worker is behind by more than its socket takes (200 KB).

        Raises:
            TypeError, pickle.PicklingError, AttributeError: an argument does not pickle; nothing was started.
        """
        future, call_id = CallFuture(self, name, tag, self.engine.pump), next(self.call_ids)
        try:
            with self.lock:
                if self.refuses is not None:
                    future.fail(died(self.index, self.incarnation, self.refuses, name))
                    return future
                self.pending[call_id] = future
                self.start_waiting()
            self.engine.send(self, lambda channel: channel.frames(CALL, call_id, name, args))
        except BaseException:
            with self.lock:
                self.pending.pop(call_id, None)
                self.stop_waiting()
            raise
        return future

    def post(self, name: str, shared: SharedValue) -> None:
        """See :meth:`Handle.post`; where the value is in a shared block, no byte of it is copied."""
        self.engine.send(self, lambda channel: channel.shared_frames(name, shared))

    def start_waiting(self) -> None:
        """Somebody waits for the worker, if nobody did; the lock is held."""
        if self.waited_for_since is None:
            self.waited_for_since = time.monotonic()

    def stop_waiting(self, sign_of_life: bool = False) -> None:
        """Nobody waits if no call is pending; else the time starts again at a sign of life. The lock is held."""
        if not self.pending:
            self.waited_for_since = None
        elif sign_of_life:
            self.waited_for_since = time.monotonic()

    def alive(self) -> bool:
        self.engine.pump.poll()
        return self.refuses is None and not self.build_failed

    def refuse(self, why: str) -> None:
        """Fails what is pending and what will be called. Does the rest if it is called again after it broke off."""
        with self.lock:
            if self.refuses is None:
                self.refuses = why
            pending = list(self.pending.values())
        for future in pending:
            if not future.is_set():
                future.fail(died(self.index, self.incarnation, self.refuses, future.name))
        with self.lock:
            self.pending = {}
