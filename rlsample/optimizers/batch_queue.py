"""The hand-off from the sampling side to the learner: bounded, in order, and honest about what it drops."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rlsample.errors import ConfigError, unknown_name
from rlsample.optimizers.background import BackgroundThreads, Stopped
from rlsample.sample_batch import SampleBatch

__all__ = ["WHEN_FULL", "BatchQueue", "TrainBatch"]

WHEN_FULL = ("block", "drop_oldest", "drop_newest")


@dataclass(frozen=True)
class TrainBatch:
    """What the learner trains on at once. The fragments are not joined: a loader copies each to where it belongs.

    Attributes:
        fragments: what evaluators returned; nobody changes them.
        replayed_rows: rows of those fragments that came from replay.
        versions: per fragment its rows, and the mean and the smallest version of the weights they were sampled under.
    """

    fragments: tuple[SampleBatch, ...]
    replayed_rows: int = 0
    versions: tuple[tuple[int, float, int], ...] = ()

    @property
    def count(self) -> int:
        """Rows."""
        return sum(fragment.count for fragment in self.fragments)


class BatchQueue:
    """At most ``capacity`` train batches, first in first out.

    Args:
        threads: whose lock guards this queue.
        when_full: what :meth:`put` does then. "block": waits. "drop_oldest": forgets the batch that waited longest.
            "drop_newest": forgets the one it was given.

    Attributes:
        num_dropped_batches, num_dropped_rows: what was forgotten so far.
    """

    def __init__(self, threads: BackgroundThreads, capacity: int, when_full: str = "block") -> None:
        if capacity < 1:
            raise ConfigError(f"learner_queue_size must be at least 1, not {capacity}")
        if when_full not in WHEN_FULL:
            raise unknown_name("when_full", when_full, WHEN_FULL)
        self.capacity = capacity
        self.num_dropped_batches = self.num_dropped_rows = 0
        self._threads = threads
        self._when_full = when_full
        self._batches: deque[TrainBatch] = deque()
        self._num_taken = 0
        self._sizes = (0, 0)  # sum and number of what put() found

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[TrainBatch]:
        """The batches that wait, oldest first; the lock is held."""
        return iter(self._batches)

    def put(self, batch: TrainBatch, timeout_s: float | None = None) -> bool:
        """Adds a batch, or not: see ``when_full``. False if it blocked until the time ran out; nothing was added then.

        Raises:
            LearnerError: a background thread failed, also while this waited; or the threads were stopped.
        """
        with self._threads.lock:
            if self._threads.stopped:
                self._threads.check()
            total, number = self._sizes
            self._sizes = (total + len(self._batches), number + 1)
            if len(self._batches) >= self.capacity:
                if self._when_full == "drop_newest":
                    self._drop(batch)
                    return True
                if self._when_full == "drop_oldest":
                    self._drop(self._batches.popleft())
            try:
                if not self._threads.wait_for(lambda: len(self._batches) < self.capacity, timeout_s):
                    return False
            except Stopped:
                self._threads.check()
            self._batches.append(batch)
            self._threads.notify_all()
            return True

    def _drop(self, batch: TrainBatch) -> None:
        self.num_dropped_batches += 1
        self.num_dropped_rows += batch.count

    def take(self) -> tuple[int, TrainBatch]:
        """Waits for the oldest batch; its number counts what was taken before it.

        Raises:
            Stopped: no more will come.
        """
        with self._threads.lock:
            self._threads.wait_for(lambda: bool(self._batches))
            number = self._num_taken
            self._num_taken += 1
            self._threads.notify_all()
            return number, self._batches.popleft()

    def mean_size(self) -> float:
        """Batches that :meth:`put` found waiting, mean since the last call: near capacity, the learner is the limit."""
        with self._threads.lock:
            (total, number), self._sizes = self._sizes, (0, 0)
        return total / max(1, number)
