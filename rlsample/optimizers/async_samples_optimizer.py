"""Sampling and learning at the same time (IMPALA, APPO)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rlsample.errors import ConfigError, unknown_name
from rlsample.evaluation.evaluator_server import policy_version_of
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.evaluation.requests import Answer
from rlsample.optimizers.background import BackgroundThreads, Timers
from rlsample.optimizers.batch_queue import WHEN_FULL, BatchQueue, TrainBatch
from rlsample.optimizers.device_group import DeviceGroup, DeviceSettings
from rlsample.optimizers.device_loader import DeviceLoader
from rlsample.optimizers.learner_stats import SinceLastStats
from rlsample.optimizers.learner_thread import BatchSource, DirectSource, LearnerThread, LoadedSource, Progress
from rlsample.optimizers.multi_device_support import find_support
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.optimizers.replay_mixer import ReplayMixer
from rlsample.optimizers.sample_requests import SampleRequests
from rlsample.sample_batch import POLICY_VERSION
from rlsample.settings import check_at_least, option

__all__ = ["AsyncSamplesOptimizer", "AsyncSamplesSettings"]

R = TypeVar("R")
_LOOK_S = 0.25  # how often a waiting step() looks for failures
_LONGEST_WAIT_S = 10.0  # of a step() for an update: whoever steps may have been asked to stop


@dataclass(frozen=True)
class AsyncSamplesSettings(DeviceSettings):
    """Options of :class:`AsyncSamplesOptimizer`."""

    train_batch_size: int = option(500, "rows the learner gets at once, fresh and replayed, in whole fragments")
    num_sgd_iter: int = option(1, "passes over each train batch")
    minibatch_size: int = option(0, "rows of one update; 0: the whole train batch; needs num_data_loader_buffers")
    minibatch_buffer_size: int = option(1, "train batches whose passes take turns")
    max_sample_requests_in_flight: int = option(2, "samples asked of one evaluator ahead of its answers")
    broadcast_interval: int = option(1, "samples after which new weights are published, if there are new ones")
    learner_queue_size: int = option(16, "train batches that may wait for the learner")
    when_full: str = option("block", "if they do: 'block' sampling, 'drop_oldest' or 'drop_newest' train batch")
    replay_proportion: float = option(0.0, "replayed rows per fresh row in a train batch")
    replay_buffer_num_slots: int = option(0, "samples kept for replay; 0: none")
    num_data_loader_buffers: int = option(0, "train batches on the devices at once; 0: no loaders, but compute_apply")
    num_data_load_threads: int = option(0, "loader threads; 0: one per buffer")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("train_batch_size", "num_sgd_iter", "minibatch_buffer_size", "max_sample_requests_in_flight")
        not_negative = ("minibatch_size", "num_data_loader_buffers", "num_data_load_threads")
        check_at_least(self, dict.fromkeys((*positive, "broadcast_interval", "learner_queue_size"), 1))
        check_at_least(self, dict.fromkeys(not_negative, 0))
        if self.when_full not in WHEN_FULL:
            raise unknown_name("when_full", self.when_full, WHEN_FULL)
        if self.num_data_loader_buffers:
            if self.num_data_loader_buffers < self.minibatch_buffer_size:
                raise ConfigError(
                    f"minibatch_buffer_size {self.minibatch_buffer_size} needs as many num_data_loader_buffers, not "
                    f"{self.num_data_loader_buffers}: a batch keeps its buffer until its last pass"
                )
        elif len(self.devices) > 1 or self.minibatch_size or self.precision != "float32":
            raise ConfigError(
                "several devices, minibatch_size and precision need data loaders: set num_data_loader_buffers to 2"
            )


class AsyncSamplesOptimizer(PolicyOptimizer):
    """Remote evaluators sample all the time, each with ``max_sample_requests_in_flight`` requests ahead; a learner
    thread trains the local one on what arrives (Espeholt et al. 2018, arXiv:1802.01561).

        sampling --fragments--> step() --train batches--> queue --(loaders, slots)--> learner --weights--> sampling

    What waits is bounded: the requests in flight, ``learner_queue_size`` batches, and ``num_data_loader_buffers`` on
    the devices (without loaders, ``minibatch_buffer_size`` in the learner's hands). The set replaces dead evaluators.
    Without loaders the learner needs no more of the local evaluator than ``compute_apply``; with loaders, the
    capability :class:`~rlsample.optimizers.multi_device_support.MultiDeviceSupport`.

    While it runs, the local evaluator belongs to the learner thread; :meth:`between_updates` gives others a look at it.

    Args:
        seed: of replay and minibatches.

    Raises:
        ConfigError: no remote evaluator, settings that cannot work, or loaders for an evaluator without the capability.
    """

    def __init__(
        self, evaluators: EvaluatorSet, settings: AsyncSamplesSettings | None = None, seed: int | None = 0
    ) -> None:
        super().__init__(evaluators)
        self.settings = s = settings or AsyncSamplesSettings()
        self.num_steps_replayed = self.num_updates = self.num_weight_syncs = 0
        if not evaluators.num_remote:
            raise ConfigError("asynchronous samples need remote evaluators: set num_workers to 1 or more")
        mixing, shuffles = np.random.SeedSequence(seed).spawn(2)
        self._rng = np.random.default_rng(mixing)
        self._mixer = ReplayMixer(s.train_batch_size, s.replay_proportion, s.replay_buffer_num_slots, self._rng)
        self._timers = Timers()
        self._threads = BackgroundThreads()
        self._queue = BatchQueue(self._threads, s.learner_queue_size, s.when_full)
        self._group: DeviceGroup | None = None
        self._loader: DeviceLoader | None = None
        source: BatchSource = DirectSource(evaluators.local, self._queue)
        if s.num_data_loader_buffers:
            source = self._make_loaded_source(int(shuffles.generate_state(1)[0]))
        self._learner = LearnerThread(
            self._threads, source, evaluators.local, s.num_sgd_iter, s.minibatch_buffer_size, self._timers
        )
        self._requests = SampleRequests(evaluators, self._learner, s.max_sample_requests_in_flight, self._timers)
        self._rows_have_version = policy_version_of(evaluators.local) is not None
        self._samples_since = 0  # the newest broadcast
        self._started = False
        self._since = SinceLastStats(self._timers)
        self._copied_before = (0, 0)

    def _make_loaded_source(self, seed: int) -> LoadedSource:
        s = self.settings
        support = find_support(self.evaluators.local)
        self._group = DeviceGroup(support, s, s.num_data_loader_buffers, timers=self._timers)
        self._loader = DeviceLoader(
            self._threads, self._queue, self._group, s.num_data_loader_buffers, s.num_data_load_threads, self._timers
        )
        return LoadedSource(self._loader, self._group, s.minibatch_size, seed)

    # ------------------------------------------------------------------ one step

    def step(self) -> dict[str, float]:
        """Hands fragments on until the learner has made an update since the last call; its statistics are means.
        Returns none where there was no update in ten seconds.

        Raises:
            LearnerError: the learner, a loader or a device's process failed; the cause is chained.
            WorkerDiedError: an evaluator died and the set's budget for replacements is used up.
            Exception: what an evaluator raised in ``sample``.
        """
        try:
            self._check()
            if not self._started:
                self._start()
            self._requests.ask()
            deadline = time.monotonic() + _LONGEST_WAIT_S
            while not (progress := self._learner.drain()).num_updates and time.monotonic() < deadline:
                self._collect()
        except BaseException:
            self._account(self._learner.drain())
            raise
        return self._account(progress)

    def _start(self) -> None:
        self._requests.start()
        if self._loader is not None:
            self._loader.start()
        self._learner.start()
        self._since.restart(self.num_steps_sampled, self.num_steps_trained)
        self._started = True  # last: if this breaks off, the next step does what is missing

    def _check(self) -> None:
        self._threads.check()
        if self._group is not None:
            self._group.check()

    def _collect(self) -> None:
        """Takes what evaluators have finished, and asks them again."""
        workers = []
        for answer in self._requests.take(_LOOK_S):
            self._take(answer)
            workers.append(answer.worker)
        self._check()
        due = self._samples_since >= self.settings.broadcast_interval
        if due and self._requests.publish_weights(self.num_steps_sampled):
            self._samples_since = 0
        for worker in workers:
            self.num_weight_syncs += self._requests.send_weights(worker)
        self._requests.ask()

    def _take(self, answer: Answer) -> None:
        fragment = answer.value
        self.num_steps_sampled += fragment.count
        self._samples_since += 1
        batch = self._mixer.add(fragment, *self._versions_of(answer))
        if batch is not None:
            self._put(batch)

    def _versions_of(self, answer: Answer) -> tuple[float, int]:
        """Mean and smallest version of the weights that the rows were sampled under."""
        fragment = answer.value
        if self._rows_have_version and POLICY_VERSION in fragment and fragment.count:
            versions = fragment[POLICY_VERSION]
            return float(versions.mean()), int(versions.min())
        version = self._requests.version_of(answer)
        return version, version

    def _put(self, batch: TrainBatch) -> None:
        started = time.perf_counter()
        while not self._queue.put(batch, _LOOK_S):
            self._check()
        self._timers.add("put_wait", time.perf_counter() - started)

    def _account(self, progress: Progress) -> dict[str, float]:
        self.num_steps_trained += progress.num_steps_trained
        self.num_steps_replayed += progress.num_steps_replayed
        self.num_updates += progress.num_updates
        self._since.add(progress)
        return progress.stats

    # ------------------------------------------------------------------ what others ask

    def between_updates(self, work: Callable[[], R]) -> R:
        """Runs ``work`` while no weight changes, in the learner's thread, and returns its result.

        Raises:
            LearnerError: a background thread failed, or the optimizer is closed.
        """
        return self._learner.between_updates(work) if self._started else work()

    def stats(self) -> dict[str, float]:
        """Counters, those of steps and updates over all resumes, and since the last call:

        sampled_steps_per_s, trained_steps_per_s · policy_lag_mean, policy_lag_max: updates between a row's weights and
        its use · learner_queue_size_mean: batches found waiting · learner_wait_share: part of the learner's time
        without data · bytes_copied_per_row, from fragments to devices · seconds, summed over threads: sample_wait_s
        and put_wait_s of step(), slot_wait_s, batch_wait_s, fill_s and copy_s of loaders, learner_wait_s and compute_s.
        """
        copied, self._copied_before = self._copied_before, self.num_copied()
        num_bytes, num_rows = (now - before for now, before in zip(self._copied_before, copied, strict=True))
        return {
            **super().stats(),
            "num_steps_replayed": self.num_steps_replayed,
            "num_updates": self.num_updates,
            "num_weight_syncs": self.num_weight_syncs,
            "num_dropped_batches": self._queue.num_dropped_batches,
            "num_dropped_rows": self._queue.num_dropped_rows + (self._group.num_dropped_rows if self._group else 0),
            "learner_queue_size_mean": self._queue.mean_size(),
            "evaluator_restarts": self.evaluators.num_restarts,
            "bytes_copied_per_row": num_bytes / max(1, num_rows),
            **self._since.take(self.num_steps_sampled, self.num_steps_trained),
        }

    def num_copied(self) -> tuple[int, int]:
        """Bytes that loaders copied so far, from fragments to host memory and on to the first device; and the rows."""
        return (0, 0) if self._group is None else (sum(self._group.num_bytes_copied()), self._group.num_rows_loaded)

    def save(self) -> dict[str, Any]:
        """Counters and the generator; batches under way and stored for replay are not kept."""
        counters = {"num_steps_replayed": self.num_steps_replayed, "num_updates": self.num_updates}
        return {**super().save(), **counters, "rng": self._rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.num_steps_replayed = int(state["num_steps_replayed"])
        self.num_updates = int(state.get("num_updates", 0))
        self._rng.bit_generator.state = state["rng"]

    def close(self) -> None:
        """Ends the threads and the devices' processes; evaluators stay open. Idempotent, within five seconds."""
        deadline = time.monotonic() + 4.0
        self._threads.stop()
        try:
            if self._group is not None:
                self._group.close()
        finally:
            self._threads.close(max(0.5, deadline - time.monotonic()))
