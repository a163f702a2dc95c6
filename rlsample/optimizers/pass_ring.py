"""Using each batch several times, with other batches in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from rlsample.errors import ConfigError

__all__ = ["PassRing"]

T = TypeVar("T")


class PassRing(Generic[T]):
    """A ring of items, visited in turn; each is given out ``num_passes`` times and then makes room for a new one.

    Where no new item has come, the next one with passes left is given out: the learner never waits beside work.

    Args:
        num_items: size of the ring.
        ready: whether ``take`` has a new item.
        take: gives it.
    """

    def __init__(self, num_items: int, num_passes: int, ready: Callable[[], bool], take: Callable[[], T]) -> None:
        if num_items < 1 or num_passes < 1:
            raise ConfigError(
                f"minibatch_buffer_size and num_sgd_iter must be at least 1, not {num_items} and {num_passes}"
            )
        self._items: list[tuple[T, int] | None] = [None] * num_items  # the item and its passes left
        self._num_passes = num_passes
        self._ready, self._take = ready, take
        self._at = 0

    def ready(self) -> bool:
        """Whether :meth:`next` has something."""
        return any(item is not None for item in self._items) or self._ready()

    def next(self) -> tuple[T, bool]:
        """``(item, whether this is its last pass)``; only if :meth:`ready`."""
        size = len(self._items)
        for at in ((self._at + i) % size for i in range(size)):
            held = self._items[at]
            if held is None and self._ready():
                held = (self._take(), self._num_passes)
            if held is not None:
                item, left = held
                self._items[at] = (item, left - 1) if left > 1 else None
                self._at = (at + 1) % size
                return item, left == 1
        raise AssertionError("next() on a ring that is not ready")
