"""Synchronous training on one or several devices: the whole batch goes there once, minibatches are made there (PPO)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.optimizers.device_group import DeviceGroup, DeviceSettings
from rlsample.optimizers.learner_stats import mean_stats
from rlsample.optimizers.multi_device_support import find_support
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option

__all__ = ["MultiGPUOptimizer", "MultiGPUSettings", "standardize_over"]


@dataclass(frozen=True)
class MultiGPUSettings(DeviceSettings):
    """Options of :class:`MultiGPUOptimizer`."""

    train_batch_size: int = option(1024, "rows to collect before learning; 0: one sample() of each evaluator")
    num_sgd_iter: int = option(10, "passes over the collected rows")
    minibatch_size: int = option(
        128, "rows of one update over all devices, rounded down to equal shares; 0: all. The last one may be smaller"
    )
    standardize_fields: tuple[str, ...] = option((), "columns to bring to mean 0 and deviation 1 before learning")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_batch_size < 0 or self.minibatch_size < 0 or self.num_sgd_iter < 1:
            raise ConfigError(
                "train_batch_size and minibatch_size must be 0 or more, num_sgd_iter 1 or more; got "
                f"{self.train_batch_size}, {self.minibatch_size}, {self.num_sgd_iter}"
            )
        if 0 < self.minibatch_size < len(self.devices):
            raise ConfigError(f"minibatch_size {self.minibatch_size} is less than a row for each device")


class MultiGPUOptimizer(PolicyOptimizer):
    """Weights out, samples in, the rows to the devices, ``num_sgd_iter`` passes of minibatches there.

    Every device holds an equal share of the rows and takes an equal share of each minibatch; gradients are added up
    over the devices, so that an update is the single-device one on the same rows. Rows that do not divide evenly (fewer
    than there are devices) are left out of that batch, and not counted as trained. Policies that need whole fragments
    get whole fragments, all of them: their shares may differ, and count by their rows.

    Args:
        evaluators: the local one offers :class:`~rlsample.optimizers.multi_device_support.MultiDeviceSupport`.
        seed: of the minibatches.

    Raises:
        ConfigError: an evaluator without the capability, or settings that cannot work.
    """

    def __init__(
        self, evaluators: EvaluatorSet, settings: MultiGPUSettings | None = None, seed: int | None = 0
    ) -> None:
        super().__init__(evaluators)
        self.settings = settings or MultiGPUSettings()
        self._rng = np.random.default_rng(seed)
        self._group = DeviceGroup(find_support(evaluators.local), self.settings)
        self._sample_s = self._load_s = self._learn_s = 0.0
        self._steps = 0

    def step(self) -> dict[str, float]:
        """Collects at least ``train_batch_size`` rows and learns on them; statistics are means over the last pass.

        Raises:
            LearnerError: the process of a device failed or ended; the cause is chained.
            Exception: what sampling or the loss raised.
        """
        started = time.perf_counter()
        self.evaluators.sync_weights()
        batches = self._collect()
        sampled = time.perf_counter()
        self.evaluators.set_progress(self.num_steps_sampled)
        self._group.load(0, batches)
        loaded = time.perf_counter()
        stats: list[dict[str, float]] = []
        for _ in range(self.settings.num_sgd_iter):
            stats, rows = self._group.train_pass(0, self.settings.minibatch_size, self._rng)
            self.num_steps_trained += rows
        self._group.release(0)
        self._sample_s += sampled - started
        self._load_s += loaded - sampled
        self._learn_s += time.perf_counter() - loaded
        self._steps += 1
        return mean_stats(stats)

    def _collect(self) -> list[SampleBatch]:
        batches: list[SampleBatch] = []
        rows = 0
        while rows < max(1, self.settings.train_batch_size):
            for batch in self.evaluators.sample_round():
                if batch.count:
                    batches.append(batch)
                rows += batch.count
                self.num_steps_sampled += batch.count
        for name in self.settings.standardize_fields:
            batches = standardize_over(batches, name)
        return batches

    def stats(self) -> dict[str, float]:
        """Adds ``sample_time_s``, ``load_time_s`` and ``learn_time_s``, means per step since the last call, the rows
        that were left out, and ``evaluator_restarts``."""
        steps = max(1, self._steps)
        found = {
            "sample_time_s": self._sample_s / steps,
            "load_time_s": self._load_s / steps,
            "learn_time_s": self._learn_s / steps,
            "num_dropped_rows": self._group.num_dropped_rows,
            "evaluator_restarts": self.evaluators.num_restarts,
        }
        self._sample_s = self._load_s = self._learn_s = 0.0
        self._steps = 0
        return {**super().stats(), **found}

    def save(self) -> dict[str, Any]:
        return {**super().save(), "rng": self._rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._rng.bit_generator.state = state["rng"]

    def close(self) -> None:
        """Ends the devices' processes. Idempotent, within five seconds."""
        self._group.close()


def standardize_over(batches: list[SampleBatch], name: str) -> list[SampleBatch]:
    """The batches with one column as ``(x - mean) / max(1e-4, std)`` over all their rows; the others are shared."""
    column = np.concatenate([batch[name] for batch in batches])
    scaled = ((column - column.mean()) / max(1e-4, float(column.std()))).astype(np.float32)
    parts = np.split(scaled, np.cumsum([batch.count for batch in batches])[:-1])
    return [
        SampleBatch({**dict(batch.items()), name: part}, batch.next_obs_source, batch.fragment_lengths)
        for batch, part in zip(batches, parts, strict=True)
    ]
