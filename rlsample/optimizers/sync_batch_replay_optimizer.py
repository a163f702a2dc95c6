"""Replay of whole samples, with rows in order: for policies that learn on sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.optimizers.sync_replay_optimizer import TD_ERRORS
from rlsample.sample_batch import SampleBatch
from rlsample.settings import check_at_least, option

__all__ = ["SyncBatchReplayOptimizer", "SyncBatchReplaySettings"]


@dataclass(frozen=True)
class SyncBatchReplaySettings:
    """Options of :class:`SyncBatchReplayOptimizer`."""

    learning_starts: int = option(1000, "rows kept before learning begins, or as many as fit in whole samples")
    buffer_size: int = option(10_000, "rows kept, in whole samples; never more")
    train_batch_size: int = option(32, "rows to replay for one update, at least: in whole samples")

    def __post_init__(self) -> None:
        check_at_least(self, {"learning_starts": 0, "buffer_size": 1, "train_batch_size": 1})
        if self.learning_starts > self.buffer_size:
            raise ConfigError(
                f"learning_starts {self.learning_starts} is never reached: buffer_size is {self.buffer_size}"
            )


class SyncBatchReplayOptimizer(PolicyOptimizer):
    """Keeps the newest samples as they came, and learns on some of them, drawn alike with replacement.

    Args:
        evaluators: the remote ones sample, or the local one where there are none.
        seed: of the draws.

    Attributes:
        num_rows_kept: in the buffer now.
    """

    def __init__(
        self, evaluators: EvaluatorSet, settings: SyncBatchReplaySettings | None = None, seed: int | None = 0
    ) -> None:
        super().__init__(evaluators)
        self.settings = settings or SyncBatchReplaySettings()
        self.num_rows_kept = 0
        self._rng = np.random.default_rng(seed)
        self._samples: dict[int, SampleBatch] = {}  # by number, in order: the oldest is the first
        self._num_added = 0
        self._learning = False

    def step(self) -> dict[str, float]:
        """Samples, then makes one update; its statistics are empty before learning starts.

        Raises:
            ConfigError: a sample larger than ``buffer_size``. It is counted, and not kept.
        """
        self.evaluators.sync_weights()
        for batch in self.evaluators.sample_round():
            self.num_steps_sampled += batch.count
            self._add(batch)
        self.evaluators.set_progress(self.num_steps_sampled)
        # Whole samples leave at once: the rows kept may fall below learning_starts again, which is no reason to pause.
        self._learning |= self.num_rows_kept >= max(1, self.settings.learning_starts)
        if not self._learning:
            return {}
        train_batch = self._draw()
        stats = dict(self.evaluators.local.compute_apply(train_batch))
        self.num_steps_trained += train_batch.count
        stats.pop(TD_ERRORS, None)
        return stats

    def _add(self, batch: SampleBatch) -> None:
        limit = self.settings.buffer_size
        if batch.count > limit:
            raise ConfigError(f"a sample of {batch.count} rows does not fit a buffer of {limit}: raise buffer_size")
        while self.num_rows_kept + batch.count > limit:
            self._learning = True  # it is full: with whole samples learning_starts may never be reached
            self.num_rows_kept -= self._samples.pop(self._num_added - len(self._samples)).count
        if batch.count:
            self._samples[self._num_added] = batch
            self._num_added += 1
            self.num_rows_kept += batch.count

    def _draw(self) -> SampleBatch:
        parts: list[SampleBatch] = []
        rows = 0
        while rows < self.settings.train_batch_size:
            part = self._samples[int(self._rng.integers(self._num_added - len(self._samples), self._num_added))]
            parts.append(part)
            rows += part.count
        if len(parts) > 1:
            return SampleBatch.concat(parts)
        return parts[0].slice(0, rows)  # a batch of its own: the evaluator may add columns

    def stats(self) -> dict[str, float]:
        """Adds ``replay_rows``, in the buffer now, and ``evaluator_restarts``, of the whole run."""
        found = {"replay_rows": self.num_rows_kept, "evaluator_restarts": self.evaluators.num_restarts}
        return {**super().stats(), **found}

    def save(self) -> dict[str, Any]:
        """Counters and the generator; samples are not kept."""
        return {**super().save(), "rng": self._rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._rng.bit_generator.state = state["rng"]
