"""The learner: a thread that trains on batches as they come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from rlsample.evaluation.evaluator_server import policy_version_of
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.optimizers.background import BackgroundThreads, Stopped, Timers
from rlsample.optimizers.batch_queue import BatchQueue, TrainBatch
from rlsample.optimizers.device_group import DeviceGroup
from rlsample.optimizers.device_loader import DeviceLoader, Slot
from rlsample.optimizers.pass_ring import PassRing
from rlsample.sample_batch import SampleBatch

__all__ = ["BatchSource", "DirectSource", "LearnerThread", "LoadedSource", "Progress"]

R = TypeVar("R")


class BatchSource(Protocol):
    """Where the learner gets items from, and how it trains on one."""

    def ready(self) -> bool:
        """Whether :meth:`take` has an item; the lock is held."""

    def take(self) -> Any:
        """The next item."""

    def batch_of(self, item: Any) -> TrainBatch:
        """The batch it was made of."""

    def train(self, item: Any) -> tuple[list[Mapping[str, Any]], int]:
        """One pass: each update's statistics, and the rows the loss was computed on."""

    def release(self, item: Any) -> None:
        """The item's last pass is over."""


class DirectSource:
    """Batches go to ``evaluator.compute_apply`` as they come: any PolicyEvaluator will do."""

    def __init__(self, evaluator: PolicyEvaluator, queue: BatchQueue) -> None:
        self._evaluator = evaluator
        self._queue = queue

    def ready(self) -> bool:
        """See :class:`BatchSource`."""
        return len(self._queue) > 0

    def take(self) -> tuple[TrainBatch, SampleBatch]:
        """The batch, and its fragments joined: one copy, none of a single fragment."""
        _, batch = self._queue.take()
        if len(batch.fragments) > 1:
            return batch, SampleBatch.concat(batch.fragments)
        only = batch.fragments[0]
        return batch, only.slice(0, only.count)  # the evaluator may add columns; replay may hold the fragment

    def batch_of(self, item: tuple[TrainBatch, SampleBatch]) -> TrainBatch:
        """See :class:`BatchSource`."""
        return item[0]

    def train(self, item: tuple[TrainBatch, SampleBatch]) -> tuple[list[Mapping[str, Any]], int]:
        """One update on all rows."""
        return [self._evaluator.compute_apply(item[1])], item[1].count

    def release(self, item: tuple[TrainBatch, SampleBatch]) -> None:
        """Nothing to do."""


class LoadedSource:
    """Batches that a :class:`DeviceLoader` has brought to the devices.

    Args:
        minibatch_size: rows of one update over all devices; 0: all.
        seed: of the minibatches.
    """

    def __init__(self, loader: DeviceLoader, group: DeviceGroup, minibatch_size: int, seed: int | None) -> None:
        self._loader = loader
        self._group = group
        self._minibatch_size = minibatch_size
        self._rng = np.random.default_rng(seed)
        self.ready = loader.ready
        self.take = loader.take
        self.release = loader.release

    def batch_of(self, item: Slot) -> TrainBatch:
        """See :class:`BatchSource`."""
        assert item.batch is not None
        return item.batch

    def train(self, item: Slot) -> tuple[list[Mapping[str, Any]], int]:
        """One pass in minibatches."""
        stats, rows = self._group.train_pass(item.index, self._minibatch_size, self._rng)
        return list(stats), rows


@dataclass
class Progress:
    """What the learner has done since somebody asked.

    Attributes:
        num_steps_trained: rows the loss was computed on; a row used in k passes counts k times.
        num_steps_replayed: those of them that came from replay.
        stats: means over the updates.
        lag_mean, lag_max: the learner's version minus the one a row was sampled under, over the rows.
    """

    num_steps_trained: int = 0
    num_steps_replayed: int = 0
    num_updates: int = 0
    lag_mean: float = 0.0
    lag_max: int = 0
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Errand:
    work: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    done: bool = False


class LearnerThread:
    """Trains on what ``source`` gives, ``num_sgd_iter`` passes each, until its threads are stopped.

    Args:
        threads: the learner is one of them.
        evaluator: its policy's version, which rows carry, is that of the weights. None, or an evaluator without a
            policy: the updates done so far are.
        num_sgd_iter: passes over each batch.
        minibatch_buffer_size: batches that take turns.
        timers: gets "learner_wait" and "compute".
    """

    def __init__(
        self,
        threads: BackgroundThreads,
        source: BatchSource,
        evaluator: PolicyEvaluator | None = None,
        num_sgd_iter: int = 1,
        minibatch_buffer_size: int = 1,
        timers: Timers | None = None,
    ) -> None:
        self._threads = threads
        self._source = source
        self._evaluator = evaluator
        self._num_updates = 0
        self._timers = timers or Timers()
        self._ring: PassRing[Any] = PassRing(minibatch_buffer_size, num_sgd_iter, source.ready, source.take)
        self._errands: deque[_Errand] = deque()
        self._sums = _Sums()

    def version(self) -> int:
        """The version of the weights now."""
        version = None if self._evaluator is None else policy_version_of(self._evaluator)
        return self._num_updates if version is None else version

    def start(self) -> None:
        """Starts the thread."""
        self._threads.start("learner", self._work)

    def _work(self) -> None:
        while True:
            started = time.perf_counter()
            errand = self._wait()
            waited = time.perf_counter()
            self._timers.add("learner_wait", waited - started)
            if errand is not None:
                self._run(errand)
                continue
            item, is_last = self._ring.next()
            self._train(item)
            if is_last:
                self._source.release(item)
            self._timers.add("compute", time.perf_counter() - waited)

    def _wait(self) -> _Errand | None:
        with self._threads.lock:
            self._threads.wait_for(lambda: bool(self._errands) or self._ring.ready())
            return self._errands.popleft() if self._errands else None

    def _train(self, item: Any) -> None:
        batch = self._source.batch_of(item)
        version = self.version()
        stats, rows = self._source.train(item)
        with self._threads.lock:
            self._num_updates += len(stats)
            self._sums.add(batch, version, stats, rows)
            self._threads.notify_all()

    def between_updates(self, work: Callable[[], R]) -> R:
        """Runs ``work`` in the learner's thread, while no weight changes, and waits for its result.

        Raises:
            LearnerError: a background thread failed, or the threads were stopped.
            BaseException: what ``work`` raised; the learner goes on.
        """
        errand = _Errand(work)
        with self._threads.lock:
            self._errands.append(errand)
            self._threads.notify_all()
            try:
                self._threads.wait_for(lambda: errand.done)
            except Stopped:
                if not errand.done:
                    self._threads.check()
            except BaseException:  # Ctrl-C: nobody waits for it any more
                if errand in self._errands:
                    self._errands.remove(errand)
                raise
        if errand.error is not None:
            raise errand.error
        return errand.result

    def _run(self, errand: _Errand) -> None:
        try:
            errand.result = errand.work()
        except Exception as error:
            errand.error = error
        with self._threads.lock:
            errand.done = True
            self._threads.notify_all()

    def drain(self) -> Progress:
        """What was done since the last call; does not wait."""
        with self._threads.lock:
            sums, self._sums = self._sums, _Sums()
        return sums.progress()

    def wait_for_progress(self, timeout_s: float) -> bool:
        """Waits until :meth:`drain` has something, or until the time is up.

        Raises:
            LearnerError: a background thread failed.
        """
        with self._threads.lock:
            try:
                return self._threads.wait_for(lambda: self._sums.num_passes > 0, timeout_s)
            except Stopped:
                self._threads.check()
                raise


class _Sums:
    """Adds up passes; small, whatever their number."""

    def __init__(self) -> None:
        self.num_passes = 0
        self._progress = Progress()
        self._stats: dict[str, tuple[float, int]] = {}
        self._lag_rows = 0
        self._lag_sum = 0.0

    def add(self, batch: TrainBatch, version: int, stats: list[Mapping[str, Any]], rows: int) -> None:
        progress = self._progress
        self.num_passes += 1
        progress.num_updates += len(stats)
        progress.num_steps_trained += rows
        progress.num_steps_replayed += min(batch.replayed_rows, rows)
        for one in stats:
            for name, value in one.items():
                total, number = self._stats.get(name, (0.0, 0))
                value = value if isinstance(value, float) else float(np.mean(value))  # which takes 5 us
                self._stats[name] = (total + value, number + 1)
        for count, mean, oldest in batch.versions:
            self._lag_rows += count
            self._lag_sum += (version - mean) * count
            progress.lag_max = max(progress.lag_max, version - oldest)

    def progress(self) -> Progress:
        self._progress.stats = {name: total / number for name, (total, number) in self._stats.items()}
        self._progress.lag_mean = self._lag_sum / max(1, self._lag_rows)
        return self._progress
