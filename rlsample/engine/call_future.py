"""The future of this package's own engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlsample.engine.engine import Future, Handle

__all__ = ["CallFuture", "Waiter", "wait_for_futures"]

_finished = itertools.count()


class Waiter(Protocol):
    """How an engine waits for its workers."""

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until ``ready()``; False if the time was up first."""

    def poll(self) -> None:
        """Takes in what has arrived."""


class CallFuture(Future):
    """Set once by its engine: by :meth:`resolve` or :meth:`fail`.

    Attributes:
        name: the method that was called.
        order: when it was set, compared with others; None before.
    """

    def __init__(self, handle: Handle, name: str, tag: Any, waiter: Waiter) -> None:
        self.handle, self.name, self.tag = handle, name, tag
        self.order: int | None = None
        self._waiter = waiter
        self._value: Any = None
        self._error: BaseException | None = None

    def resolve(self, value: Any) -> None:
        self._value = value
        self.order = next(_finished)

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.order = next(_finished)

    def is_set(self) -> bool:
        """As :meth:`done`, but takes nothing in."""
        return self.order is not None

    def done(self) -> bool:
        if self.order is None:
            self._waiter.poll()
        return self.order is not None

    def result(self, timeout_s: float | None = None) -> Any:
        if not self._waiter.wait_for(self.is_set, timeout_s):
            raise TimeoutError(f"worker {self.handle.index}: {self.name!r} was not answered within {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._value


def wait_for_futures(
    waiter: Waiter, futures: Sequence[Any], num_ready: int, timeout_s: float | None
) -> tuple[list[Future], list[Future]]:
    """:meth:`Engine.wait` for futures of this kind."""
    wanted = min(num_ready, len(futures))

    def ready() -> bool:
        return sum(future.order is not None for future in futures) >= wanted

    if ready():
        waiter.poll()  # others may have come in since
    else:
        waiter.wait_for(ready, timeout_s)
    done: list[Any] = []
    pending: list[Any] = []
    for future in futures:
        (done if future.order is not None else pending).append(future)
    done.sort(key=lambda future: future.order)
    return done, pending
