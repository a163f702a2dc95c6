"""Sampling, replay and learning at the same time (Ape-X)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.evaluation.requests import Answer
from rlsample.optimizers.background import BackgroundThreads, Timers
from rlsample.optimizers.batch_queue import BatchQueue
from rlsample.optimizers.learner_stats import SinceLastStats
from rlsample.optimizers.learner_thread import LearnerThread, Progress
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.optimizers.replay_shards import ReplayShard, ReplaySource, replay_forever
from rlsample.optimizers.sample_requests import SampleRequests
from rlsample.optimizers.sync_replay_optimizer import ReplaySettings, make_buffer
from rlsample.settings import check_at_least, option

__all__ = ["AsyncReplayOptimizer", "AsyncReplaySettings", "worker_epsilon"]

R = TypeVar("R")
_LOOK_S = 0.25  # how often a waiting step() looks for failures
_LONGEST_WAIT_S = 10.0  # of a step() for an update: whoever steps may have been asked to stop


@dataclass(frozen=True)
class AsyncReplaySettings(ReplaySettings):
    """Options of :class:`AsyncReplayOptimizer`."""

    train_batch_size: int = option(512, "replayed rows of one update")
    num_replay_buffer_shards: int = option(1, "buffers; buffer_size and learning_starts are divided among them")
    max_sample_requests_in_flight: int = option(2, "samples asked of one evaluator ahead of its answers")
    max_replays_in_flight: int = option(4, "batches drawn from one shard that may wait for the learner")
    learner_queue_size: int = option(16, "batches that may wait for the learner, of all shards")
    max_weight_sync_delay: int = option(400, "rows an evaluator samples before it gets new weights")
    training_intensity: float = option(
        0.0, "trained rows per sampled row, under which sampling waits; 0: it never does"
    )
    per_worker_exploration: bool = option(False, "evaluator i of N keeps epsilon at 0.4 ** (1 + 7 * i / (N - 1))")

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("num_replay_buffer_shards", "max_sample_requests_in_flight", "max_replays_in_flight")
        check_at_least(self, dict.fromkeys((*names, "learner_queue_size", "max_weight_sync_delay"), 1))
        if not self.training_intensity >= 0:
            raise ConfigError(f"training_intensity must be 0 or more, not {self.training_intensity}")
        if self.buffer_size < self.num_replay_buffer_shards:
            raise ConfigError(
                f"buffer_size {self.buffer_size} leaves some of {self.num_replay_buffer_shards} "
                "num_replay_buffer_shards without a row"
            )


class AsyncReplayOptimizer(PolicyOptimizer):
    """Remote evaluators sample all the time; their rows go to a replay shard drawn at random. A replay thread draws
    batches, a learner thread trains the local evaluator on them and sends the errors back as priorities (Horgan et al.
    2018, arXiv:1803.00933).

        sampling --rows--> step() --> shards --> replay thread --batches--> queue --> learner --weights--> sampling
                                        ^------------------- priorities ----------------'

    What waits is bounded: ``max_sample_requests_in_flight`` per evaluator, and in the queue ``max_replays_in_flight``
    batches of each shard, of all ``learner_queue_size``. The replay thread waits for room before it draws: nothing that
    was drawn is dropped. With ``training_intensity`` sampling waits for the learner too, from ``learning_starts``
    on: what a run reaches in so many env steps then depends less on the machine. Shards are arrays in this process.
    The set replaces dead evaluators.

    While it runs, the local evaluator belongs to the learner thread; :meth:`between_updates` gives others a look at it.

    Args:
        seed: of the draws.

    Raises:
        ConfigError: no remote evaluator, or settings that cannot work.
    """

    def __init__(
        self, evaluators: EvaluatorSet, settings: AsyncReplaySettings | None = None, seed: int | None = 0
    ) -> None:
        super().__init__(evaluators)
        self.settings = s = settings or AsyncReplaySettings()
        if not evaluators.num_remote:
            raise ConfigError("asynchronous replay needs remote evaluators: set num_workers to 1 or more")
        self.num_updates = self.num_weight_syncs = 0
        choices, *draws = np.random.SeedSequence(seed).spawn(1 + s.num_replay_buffer_shards)
        self._rng = np.random.default_rng(choices)
        num = s.num_replay_buffer_shards
        self.shards = [
            ReplayShard(make_buffer(s, draw, s.buffer_size // num), s.learning_starts // num) for draw in draws
        ]
        self._timers = Timers()
        self._threads = BackgroundThreads()
        self._queue = BatchQueue(self._threads, s.learner_queue_size)
        source = ReplaySource(evaluators.local, self._queue, self.shards)
        self._learner = LearnerThread(self._threads, source, evaluators.local, timers=self._timers)
        self._requests = SampleRequests(evaluators, self._learner, s.max_sample_requests_in_flight, self._timers)
        self._rows_since = [0] * evaluators.num_remote  # each evaluator last got weights
        self._restarts_seen = 0
        self._started = False
        self._since = SinceLastStats(self._timers)

    # ------------------------------------------------------------------ one step

    def step(self) -> dict[str, float]:
        """Takes what evaluators have sampled until the learner has made an update since the last call; its statistics
        are means. Before learning starts: one round of samples, and no statistics; nor where there was no update in ten
        seconds.

        Raises:
            LearnerError: the learner or the replay thread failed; the cause is chained.
            WorkerDiedError: an evaluator died and the set's budget for replacements is used up.
            Exception: what an evaluator raised in ``sample``.
        """
        try:
            self._threads.check()
            if not self._started:
                self._start()
            self._ask()
            wanted = self.evaluators.num_remote
            taken = self._collect(0.0)
            deadline = time.monotonic() + _LONGEST_WAIT_S
            while not (progress := self._learner.drain()).num_updates and time.monotonic() < deadline:
                if taken >= wanted and not any(shard.ready() for shard in self.shards):
                    break
                taken += self._collect(_LOOK_S)
        except BaseException:
            self._account(self._learner.drain())
            raise
        return self._account(progress)

    def _start(self) -> None:
        self._requests.start()
        self._explore()
        self._learner.start()
        s = self.settings
        amounts = s.train_batch_size, s.max_replays_in_flight
        work = functools.partial(
            replay_forever, self._threads, self.shards, self._queue, *amounts, self._beta, self._timers
        )
        self._threads.start("replay", work)
        self._since.restart(self.num_steps_sampled, self.num_steps_trained)
        self._started = True  # last: if this breaks off, the next step does what is missing

    def _beta(self) -> float:
        return self.settings.beta(self.num_steps_sampled)

    def _explore(self) -> None:
        restarts = self.evaluators.num_restarts
        if self.settings.per_worker_exploration:
            self.evaluators.foreach_evaluator_with_index(
                functools.partial(_set_epsilon, num_workers=self.evaluators.num_remote)
            )
        self._restarts_seen = restarts

    def _collect(self, timeout_s: float) -> int:
        """Takes what evaluators have finished, and asks them again; returns how many answers there were."""
        taken = 0
        if self._requests.in_flight():
            for answer in self._requests.take(timeout_s):
                self._take(answer)
                taken += 1
        else:  # sampling waits for the learner
            self._learner.wait_for_progress(timeout_s)
        self._threads.check()
        if self.evaluators.num_restarts != self._restarts_seen:
            self._explore()
        self._ask()
        return taken

    def _ask(self) -> None:
        if not self._is_ahead():
            self._requests.ask()

    def _is_ahead(self) -> bool:
        fresh = self.num_steps_sampled - self.settings.learning_starts
        behind = self.num_steps_trained < self.settings.training_intensity * fresh
        return behind and any(shard.ready() for shard in self.shards)

    def _take(self, answer: Answer) -> None:
        batch = answer.value
        self.num_steps_sampled += batch.count
        began = time.perf_counter()
        shard = self.shards[int(self._rng.integers(len(self.shards)))]
        shard.add(batch)
        with self._threads.lock:
            self._threads.notify_all()  # the replay thread may wait for rows
        self._timers.add("add", time.perf_counter() - began)
        self._rows_since[answer.worker] += batch.count
        if self._rows_since[answer.worker] >= self.settings.max_weight_sync_delay:
            self._rows_since[answer.worker] = 0
            self._requests.publish_weights(self.num_steps_sampled)
            self.num_weight_syncs += self._requests.send_weights(answer.worker)

    def _account(self, progress: Progress) -> dict[str, float]:
        self.num_steps_trained += progress.num_steps_trained
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
        """Counters, those of steps and updates over all resumes; ``replay_rows`` and ``replay_bytes`` now; and since
        the last call:

        sampled_steps_per_s, trained_steps_per_s · policy_lag_mean, policy_lag_max: updates between a row's weights and
        its use, 0 where rows carry no policy_version · learner_queue_size_mean: batches found waiting ·
        learner_wait_share: part of the learner's time without data · seconds: sample_wait_s and add_s of step(),
        replay_s, learner_wait_s and compute_s.

        ``num_late_priorities``: rows that had left their shard when their priorities came back.
        """
        return {
            **super().stats(),
            "num_updates": self.num_updates,
            "num_weight_syncs": self.num_weight_syncs,
            "num_dropped_batches": self._queue.num_dropped_batches,
            "num_late_priorities": sum(shard.num_late_priorities for shard in self.shards),
            "replay_rows": sum(len(shard) for shard in self.shards),
            "replay_bytes": sum(shard.nbytes for shard in self.shards),
            "learner_queue_size_mean": self._queue.mean_size(),
            "evaluator_restarts": self.evaluators.num_restarts,
            **self._since.take(self.num_steps_sampled, self.num_steps_trained),
        }

    def save(self) -> dict[str, Any]:
        """Counters, the generator, and the shards if ``store_buffer_in_checkpoints`` is set; no batches under way."""
        stored = self.settings.store_buffer_in_checkpoints
        shards = [shard.get_state() for shard in self.shards] if stored else None
        counters = {**super().save(), "num_updates": self.num_updates}
        return {**counters, "rng": self._rng.bit_generator.state, "shards": shards}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`save`, before the first step.

        Raises:
            ConfigError: stored shards that are not these, in number or size; nothing changed but shards before that.
        """
        shards = state.get("shards") or []
        if shards and len(shards) != len(self.shards):
            raise ConfigError(
                f"the checkpoint has {len(shards)} replay shards and this run {len(self.shards)}: use "
                f"num_replay_buffer_shards={len(shards)}"
            )
        for shard, stored in zip(self.shards, shards, strict=False):
            shard.set_state(stored)
        super().restore(state)
        self.num_updates = int(state.get("num_updates", 0))
        self._rng.bit_generator.state = state["rng"]

    def close(self) -> None:
        """Ends the threads; evaluators stay open. Idempotent, within five seconds."""
        self._threads.close()


def worker_epsilon(worker: int, num_workers: int) -> float:
    """Epsilon of evaluator ``worker``, counted from 0, of ``num_workers`` (arXiv:1803.00933, section 4.1)."""
    return float(0.4 ** (1 + 7 * worker / max(1, num_workers - 1)))


def _set_epsilon(evaluator: PolicyEvaluator, index: int, num_workers: int) -> None:
    fix = getattr(getattr(evaluator, "policy", None), "fix_epsilon", None)
    if index and fix is not None:
        fix(worker_epsilon(index - 1, num_workers))
