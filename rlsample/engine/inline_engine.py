"""Objects in this thread: each call runs to its end before ``call`` returns. For tests and small work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from rlsample.engine.call_future import CallFuture, wait_for_futures
from rlsample.engine.engine import Engine, Future, Handle
from rlsample.engine.failures import died
from rlsample.engine.shared_value import SharedValue
from rlsample.errors import WorkerDiedError, first_of

__all__ = ["InlineEngine", "InlineHandle"]


class _NoWaiting:
    """Everything has happened already."""

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        return ready()

    def poll(self) -> None:
        return


class InlineHandle(Handle):
    """See :class:`~rlsample.engine.engine.Handle`.

    Attributes:
        object: what the factory returned; None if it raised.
    """

    def __init__(self, index: int, incarnation: int, factory: Callable[[int, int], Any], copies: bool) -> None:
        self.index, self.incarnation, self.factory, self._copies = index, incarnation, factory, copies
        self.object: Any = None
        self.refuses: str | None = None
        self._build_error: Exception | None = None
        try:
            self.object = factory(index, incarnation)
        except Exception as e:
            self._build_error = e
        self._post_error: Exception | None = None

    def call(self, name: str, *args: Any, tag: Any = None) -> Future:
        future = CallFuture(self, name, tag, _NoWaiting())
        failed, self._post_error = self._build_error or self._post_error, None
        if self.refuses is not None:
            future.fail(died(self.index, self.incarnation, self.refuses, name))
        elif failed is not None:
            future.fail(failed)
        else:
            self._run(future, name, copy.deepcopy(args) if self._copies else args)
        return future

    def _run(self, future: CallFuture, name: str, args: tuple[Any, ...]) -> None:
        try:
            value = getattr(self.object, name)(*args)
            future.resolve(copy.deepcopy(value) if self._copies else value)
        except Exception as e:
            future.fail(e)

    def post(self, name: str, shared: SharedValue) -> None:
        """See :meth:`Handle.post`; it runs now."""
        if self.refuses is not None or self._build_error is not None:
            return
        try:
            getattr(self.object, name)(shared.load())
        except Exception as e:
            self._post_error = self._post_error or e

    def alive(self) -> bool:
        return self.refuses is None and self._build_error is None

    def end(self, why: str) -> None:
        """Closes the object, once."""
        if self.refuses is None:
            self.refuses = why
            close = getattr(self.object, "close", None)
            if close is not None:
                close()


class InlineEngine(Engine):
    """See :class:`~rlsample.engine.engine.Engine`.

    Args:
        copies: deep copies of arguments and results. False: the objects promise themselves to keep nothing of what they
            are given and to give out fresh arrays, as PolicyEvaluators do.
    """

    def __init__(self, copies: bool = True) -> None:
        self._copies = copies
        self._handles: list[InlineHandle] = []
        self._closed = False

    def create(self, factory: Callable[[int, int], Any]) -> InlineHandle:
        self._check_open()
        handle = InlineHandle(len(self._handles), 0, factory, self._copies)
        self._handles.append(handle)
        return handle

    def replace(self, handle: Handle) -> InlineHandle:
        self._check_open()
        assert isinstance(handle, InlineHandle)
        handle.end("was replaced")
        new = InlineHandle(handle.index, handle.incarnation + 1, handle.factory, self._copies)
        self._handles[handle.index] = new
        return new

    def share(self, value: Any) -> SharedValue:
        """See :meth:`Engine.share`."""
        return SharedValue(value)

    def wait(
        self, futures: Sequence[Future], num_ready: int = 1, timeout_s: float | None = None
    ) -> tuple[list[Future], list[Future]]:
        return wait_for_futures(_NoWaiting(), futures, num_ready, timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerDiedError("this InlineEngine is closed")

    def close(self) -> None:
        """Closes every object, also if one fails to; then raises the first failure, which names the others."""
        self._closed = True
        failed = []
        for handle in self._handles:
            try:
                handle.end("was closed")
            except Exception as e:
                failed.append((f"worker {handle.index}", e))
        if failed:
            raise first_of(failed)
