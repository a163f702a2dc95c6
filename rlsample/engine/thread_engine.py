"""Objects in threads of this process, one thread each. For tests, and for work that waits more than it computes."""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlsample.changes import Changes
from rlsample.engine.call_future import CallFuture, wait_for_futures
from rlsample.engine.engine import Engine, Future, Handle
from rlsample.engine.failures import died
from rlsample.engine.shared_value import Posts, SharedValue
from rlsample.errors import WorkerDiedError, first_of

__all__ = ["ThreadEngine", "ThreadHandle"]

log = logging.getLogger(__name__)


class _Arrivals:
    """Tells those who wait when a future was set."""

    def __init__(self) -> None:
        self._changes = Changes()

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        with self._changes.lock:
            return self._changes.wait_for(ready, timeout_s)

    def poll(self) -> None:
        return

    def tell(self) -> None:
        with self._changes.lock:
            self._changes.notify_all()


class ThreadHandle(Handle):
    """See :class:`~rlsample.engine.engine.Handle`."""

    def __init__(
        self, index: int, incarnation: int, factory: Callable[[int, int], Any], copies: bool, arrivals: _Arrivals
    ) -> None:
        self.index, self.incarnation, self.factory = index, incarnation, factory
        self._copies, self._arrivals = copies, arrivals
        self._object: Any = None
        self._refuses: str | None = None
        self._build_error: Exception | None = None
        self._close_errors: list[Exception] = []
        self._closed = False
        self._pending: set[CallFuture] = set()
        self._lock = threading.Lock()  # guards pending, refuses and closed
        self._posts = Posts()
        self._calls: queue.SimpleQueue[tuple[CallFuture, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"rlsample-worker-{index}", daemon=True)
        self._thread.start()

    def call(self, name: str, *args: Any, tag: Any = None) -> Future:
        future = CallFuture(self, name, tag, self._arrivals)
        taken = copy.deepcopy(args) if self._copies else args
        with self._lock:
            if self._refuses is None:
                self._pending.add(future)
                self._calls.put((future, taken))
            else:
                future.fail(died(self.index, self.incarnation, self._refuses, name))
        return future

    def post(self, name: str, shared: SharedValue) -> None:
        """See :meth:`Handle.post`."""
        self._posts.put(name, shared)

    def alive(self) -> bool:
        return self._refuses is None and self._build_error is None

    def _run(self) -> None:
        try:
            self._object = self.factory(self.index, self.incarnation)
        except Exception as e:
            self._build_error = e
        while True:
            item = self._calls.get()
            if item is None:
                break
            self._answer(*item)
            del item  # its arrays are not kept until the next call
        self._close_object()

    def _answer(self, future: CallFuture, args: tuple[Any, ...]) -> None:
        value, error = None, self._build_error
        if error is None and not future.is_set():
            try:
                self._posts.deliver(self._object)
                value = getattr(self._object, future.name)(*args)
                value = copy.deepcopy(value) if self._copies else value
            except Exception as e:
                error = e
        with self._lock:
            if future not in self._pending:
                return  # it was replaced or closed meanwhile
            self._pending.discard(future)
        if error is None:
            future.resolve(value)
        else:
            future.fail(error)
        self._arrivals.tell()

    def refuse(self, why: str) -> None:
        """Fails what is pending and what will be called; the thread closes the object and ends."""
        with self._lock:
            if self._refuses is not None:
                return
            self._refuses = why
            pending, self._pending = self._pending, set()
        for future in pending:
            future.fail(died(self.index, self.incarnation, why, future.name))
        self._arrivals.tell()
        self._calls.put(None)

    def _close_object(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        close = getattr(self._object, "close", None)
        if closed or close is None:
            return
        try:
            close()
        except Exception as e:
            self._close_errors.append(e)

    def end(self, deadline: float) -> Exception | None:
        """Waits for the thread; if it stays busy, closes the object from here. Returns what ``close`` raised."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._close_object()
                self._thread.join(_AFTER_CLOSE_S)
            if self._thread.is_alive():
                log.warning("worker %d is still busy; its thread ends with its call", self.index)
        return self._close_errors[0] if self._close_errors else None


_AFTER_CLOSE_S = 0.5


class ThreadEngine(Engine):
    """See :class:`~rlsample.engine.engine.Engine`. A call that never ends keeps its thread, which is a daemon.

    Args:
        copies: deep copies of arguments and results; see :class:`~rlsample.engine.InlineEngine`.
        close_timeout_s: how long :meth:`close` waits for running calls.
    """

    def __init__(self, copies: bool = True, close_timeout_s: float = 2.0) -> None:
        self._copies, self._close_timeout_s = copies, close_timeout_s
        self._arrivals = _Arrivals()
        self._handles: list[ThreadHandle] = []
        self._replaced: list[ThreadHandle] = []
        self._closed = False
        self._lock = threading.Lock()

    def create(self, factory: Callable[[int, int], Any]) -> ThreadHandle:
        with self._lock:
            self._check_open()
            handle = ThreadHandle(len(self._handles), 0, factory, self._copies, self._arrivals)
            self._handles.append(handle)
        return handle

    def replace(self, handle: Handle) -> ThreadHandle:
        """See :meth:`Engine.replace`. The old object is closed when its running call ends."""
        assert isinstance(handle, ThreadHandle)
        with self._lock:
            self._check_open()
            handle.refuse("was replaced")
            self._replaced.append(handle)
            new = ThreadHandle(handle.index, handle.incarnation + 1, handle.factory, self._copies, self._arrivals)
            self._handles[handle.index] = new
        return new

    def share(self, value: Any) -> SharedValue:
        """See :meth:`Engine.share`."""
        return SharedValue(value)

    def wait(
        self, futures: Sequence[Future], num_ready: int = 1, timeout_s: float | None = None
    ) -> tuple[list[Future], list[Future]]:
        return wait_for_futures(self._arrivals, futures, num_ready, timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerDiedError("this ThreadEngine is closed")

    def close(self) -> None:
        """Closes every object, also if one fails to; then raises the first failure, which names the others."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            handles = [*self._handles, *self._replaced]
        for handle in handles:
            handle.refuse("was closed")
        deadline = time.monotonic() + self._close_timeout_s
        ends = [(f"worker {handle.index}", handle.end(deadline)) for handle in handles]
        failed = [(who, error) for who, error in ends if error is not None]
        if failed:
            raise first_of(failed)
