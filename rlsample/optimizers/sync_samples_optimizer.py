"""Synchronous training: sample, then learn on it in minibatches (PPO, A2C)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.optimizers.learner_stats import mean_stats
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option

__all__ = ["SyncSamplesOptimizer", "SyncSamplesSettings", "standardized"]


@dataclass(frozen=True)
class SyncSamplesSettings:
    """Options of :class:`SyncSamplesOptimizer`."""

    train_batch_size: int = option(0, "rows to collect before learning; 0: one sample() of each evaluator")
    num_sgd_iter: int = option(1, "passes over the collected rows")
    minibatch_size: int = option(0, "rows of one update; 0: all. The last one of a pass may be smaller")
    standardize_fields: tuple[str, ...] = option((), "columns to bring to mean 0 and deviation 1 before learning")

    def __post_init__(self) -> None:
        if self.train_batch_size < 0 or self.minibatch_size < 0 or self.num_sgd_iter < 1:
            raise ConfigError(
                "train_batch_size and minibatch_size must be 0 or more, num_sgd_iter 1 or more; got "
                f"{self.train_batch_size}, {self.minibatch_size}, {self.num_sgd_iter}"
            )


class SyncSamplesOptimizer(PolicyOptimizer):
    """Weights out, samples in, ``num_sgd_iter`` passes of shuffled minibatches on the local evaluator.

    Samples come in rounds: one of each evaluator, all at the same time, in the evaluators' order, until there are
    enough rows. So the same seed gives the same run with any engine.

    Args:
        evaluators: the remote ones sample, or the local one where there are none.
        seed: of the shuffles.
    """

    def __init__(
        self, evaluators: EvaluatorSet, settings: SyncSamplesSettings | None = None, seed: int | None = 0
    ) -> None:
        super().__init__(evaluators)
        self.settings = settings or SyncSamplesSettings()
        self._rng = np.random.default_rng(seed)
        self._sample_s = self._learn_s = 0.0
        self._steps = 0

    def step(self) -> dict[str, float]:
        """Collects at least ``train_batch_size`` rows and learns on them; statistics are means over the last pass."""
        started = time.perf_counter()
        self.evaluators.sync_weights()
        batch = self._collect()
        sampled = time.perf_counter()
        stats = self._learn(batch)
        self._sample_s += sampled - started
        self._learn_s += time.perf_counter() - sampled
        self._steps += 1
        return stats

    def _collect(self) -> SampleBatch:
        parts: list[SampleBatch] = []
        rows = 0
        while rows < max(1, self.settings.train_batch_size):
            for batch in self.evaluators.sample_round():
                if batch.count:
                    parts.append(batch)
                rows += batch.count
                self.num_steps_sampled += batch.count
        return parts[0] if len(parts) == 1 else SampleBatch.concat(parts)

    def _learn(self, batch: SampleBatch) -> dict[str, float]:
        local, settings = self.evaluators.local, self.settings
        self.evaluators.set_progress(self.num_steps_sampled)
        for name in settings.standardize_fields:
            batch[name] = standardized(batch[name])
        size = settings.minibatch_size or batch.count
        last_pass: list[dict[str, float]] = []
        for _ in range(settings.num_sgd_iter):
            last_pass = []
            for minibatch in [batch] if size >= batch.count else batch.minibatches(size, self._rng):
                last_pass.append(local.compute_apply(minibatch))
                self.num_steps_trained += minibatch.count
        return mean_stats(last_pass)

    def stats(self) -> dict[str, float]:
        """Adds ``sample_time_s, learn_time_s``, means per step since the last call, and ``evaluator_restarts``."""
        steps = max(1, self._steps)
        times = {"sample_time_s": self._sample_s / steps, "learn_time_s": self._learn_s / steps}
        self._sample_s = self._learn_s = 0.0
        self._steps = 0
        return {**super().stats(), **times, "evaluator_restarts": self.evaluators.num_restarts}

    def save(self) -> dict[str, Any]:
        return {**super().save(), "rng": self._rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._rng.bit_generator.state = state["rng"]


def standardized(x: np.ndarray) -> np.ndarray:
    """``(x - mean) / max(1e-4, std)`` as a new float32 array."""
    return ((x - x.mean()) / max(1e-4, float(x.std()))).astype(np.float32)
