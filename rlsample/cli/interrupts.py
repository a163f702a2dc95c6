"""Ctrl-C and SIGTERM as a request: the running iteration ends, then a checkpoint is written."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["on_interrupt"]


@contextlib.contextmanager
def on_interrupt(request: Callable[[int], None]) -> Iterator[None]:
    """Calls ``request(signal number)`` at the first SIGINT or SIGTERM; the second one acts as if this were not here.

    For the main thread. The handlers from before come back at the end.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def first(number: int, frame: FrameType | None) -> None:
        restore()
        request(number)

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        restore()
