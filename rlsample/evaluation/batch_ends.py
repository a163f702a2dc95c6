"""Where an evaluator's batches may go to, and come from, beside its own sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from rlsample.sample_batch import SampleBatch

__all__ = ["BatchSink", "BatchSource"]


class BatchSink(Protocol):
    """Takes batches, such as :class:`~rlsample.offline.LogWriter`."""

    def write(self, batch: SampleBatch) -> None:
        """Takes one batch; keeps no reference to its arrays when it returns."""

    def close(self) -> None:
        """Idempotent."""


class BatchSource(Protocol):
    """Gives batches in place of the sampler's.

    Attributes:
        samples: some of them are the sampler's own.
    """

    samples: bool

    def __iter__(self) -> Iterator[SampleBatch]:
        """Itself."""

    def __next__(self) -> SampleBatch:
        """The next batch; the caller may change it."""

    def get_state(self) -> Any:
        """Where it is: numbers, strings, and dicts or lists of them."""

    def set_state(self, state: Any) -> None:
        """Goes on from :meth:`get_state`."""

    def close(self) -> None:
        """Idempotent."""
