"""Replay beside sampling and learning: buffers that threads share, and a thread that draws from them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.optimizers.background import BackgroundThreads, Timers
from rlsample.optimizers.batch_queue import BatchQueue, TrainBatch
from rlsample.optimizers.replay_buffer import REPLAY_ID, PrioritizedReplayBuffer, ReplayBuffer
from rlsample.optimizers.sync_replay_optimizer import TD_ERRORS
from rlsample.sample_batch import POLICY_VERSION, SampleBatch

__all__ = ["ReplayShard", "ReplaySource", "ReplayedBatch", "replay_forever"]


@dataclass(frozen=True)
class ReplayedBatch(TrainBatch):
    """A train batch of one fragment, drawn from shard number ``shard``."""

    shard: int = 0


class ReplayShard:
    """A replay buffer for several threads: one call at a time.

    Args:
        learning_starts: rows in it before anything is drawn.
    """

    def __init__(self, buffer: ReplayBuffer, learning_starts: int) -> None:
        self._buffer = buffer
        self._learning_starts = max(1, learning_starts)
        self._lock = threading.Lock()
        self.num_late_priorities = 0

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken."""
        return self._buffer.nbytes

    def ready(self) -> bool:
        """Whether there are rows enough to draw from."""
        return len(self._buffer) >= self._learning_starts

    def add(self, batch: SampleBatch) -> None:
        """See :meth:`ReplayBuffer.add`."""
        with self._lock:
            self._buffer.add(batch)

    def sample(self, num_rows: int, beta: float) -> SampleBatch:
        """Draws rows, with weights where the buffer is prioritised."""
        with self._lock:
            if isinstance(self._buffer, PrioritizedReplayBuffer):
                return self._buffer.sample(num_rows, beta)
            return self._buffer.sample(num_rows)

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> None:
        """Sets priorities; rows that have left meanwhile are counted in ``num_late_priorities``."""
        with self._lock:
            if isinstance(self._buffer, PrioritizedReplayBuffer):
                self.num_late_priorities += self._buffer.update_priorities(ids, errors)

    def get_state(self) -> dict[str, Any]:
        """See :meth:`ReplayBuffer.get_state`."""
        with self._lock:
            return self._buffer.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See :meth:`ReplayBuffer.set_state`."""
        with self._lock:
            self._buffer.set_state(state)


def replay_forever(
    threads: BackgroundThreads,
    shards: Sequence[ReplayShard],
    queue: BatchQueue,
    num_rows: int,
    max_waiting: int,
    beta: Callable[[], float],
    timers: Timers,
) -> None:
    """The work of the replay thread: batches of the shards that are ready, in turn, as long as the queue has room and
    fewer than ``max_waiting`` of that shard wait in it.

    Raises:
        Stopped, LearnerError: the threads were stopped.
    """

    def next_shard() -> int | None:
        """The shard to draw from, if there is one now; the lock is held."""
        if len(queue) >= queue.capacity:
            return None
        waiting = Counter(batch.shard for batch in queue if isinstance(batch, ReplayedBatch))
        in_turn = [(turn + i) % len(shards) for i in range(len(shards))]
        return next((i for i in in_turn if shards[i].ready() and waiting[i] < max_waiting), None)

    turn = 0
    while True:
        with threads.lock:
            threads.wait_for(lambda: next_shard() is not None)
            index = next_shard()
        assert index is not None
        turn = index + 1
        began = time.perf_counter()
        batch = shards[index].sample(num_rows, beta())
        timers.add("replay", time.perf_counter() - began)
        versions: tuple[tuple[int, float, int], ...] = ()
        if POLICY_VERSION in batch:
            column = batch[POLICY_VERSION]
            versions = ((batch.count, float(column.mean()), int(column.min())),)
        queue.put(ReplayedBatch((batch,), batch.count, versions, index))


class ReplaySource:
    """For the learner: batches from the queue go to ``evaluator.compute_apply``, and errors back to their shards."""

    def __init__(self, evaluator: PolicyEvaluator, queue: BatchQueue, shards: Sequence[ReplayShard]) -> None:
        self._evaluator = evaluator
        self._queue = queue
        self._shards = shards

    def ready(self) -> bool:
        """See :class:`~rlsample.optimizers.learner_thread.BatchSource`."""
        return len(self._queue) > 0

    def take(self) -> ReplayedBatch:
        """The batch that waited longest."""
        _, batch = self._queue.take()
        assert isinstance(batch, ReplayedBatch)
        return batch

    def batch_of(self, item: ReplayedBatch) -> TrainBatch:
        """Itself."""
        return item

    def train(self, item: ReplayedBatch) -> tuple[list[Mapping[str, Any]], int]:
        """One update on all rows."""
        (batch,) = item.fragments
        count, ids = batch.count, batch[REPLAY_ID]
        stats = dict(self._evaluator.compute_apply(batch))
        errors = stats.pop(TD_ERRORS, None)
        if errors is not None:
            self._shards[item.shard].update_priorities(ids, np.asarray(errors))
        return [stats], count

    def release(self, item: ReplayedBatch) -> None:
        """Nothing to do."""
