"""Large batches on little memory: gradients of small parts, added up, then one update."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.policy.policy_group import PolicyGroup
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option

__all__ = ["MicrobatchOptimizer", "MicrobatchSettings"]


@dataclass(frozen=True)
class MicrobatchSettings:
    """Options of :class:`MicrobatchOptimizer`."""

    train_batch_size: int = option(10_000, "rows of one update, at least")
    microbatch_size: int = option(1_000, "rows whose gradients are computed at once, at most; less than the batch")

    def __post_init__(self) -> None:
        if not 1 <= self.microbatch_size < self.train_batch_size:
            raise ConfigError(
                f"microbatch_size must be at least 1 and less than train_batch_size={self.train_batch_size}, "
                f"not {self.microbatch_size}"
            )


class MicrobatchOptimizer(PolicyOptimizer):
    """Samples in rounds until there are ``train_batch_size`` rows. Each time ``microbatch_size`` rows are there it
    computes their gradients and lets go of them; at the end it applies the mean of the gradients.

    The mean is weighted by rows: for a loss that is a mean over rows it is the gradient on all rows at once, whatever
    the size of the parts.

    Raises:
        ConfigError: several policies (``policy_mapping_fn``), each of which has a mean of its own.
    """

    def __init__(self, evaluators: EvaluatorSet, settings: MicrobatchSettings | None = None) -> None:
        super().__init__(evaluators)
        if isinstance(getattr(evaluators.local, "policy", None), PolicyGroup):
            raise ConfigError(
                "the rows of several policies cannot be weighed against each other in parts of a batch: train them "
                "with SyncSamplesOptimizer"
            )
        self.settings = settings or MicrobatchSettings()
        self._step_s = self._gradient_s = self._apply_s = 0.0
        self._steps = 0

    def step(self) -> dict[str, float]:
        """One update; statistics are means over its rows."""
        started = time.perf_counter()
        evaluators, size = self.evaluators, self.settings.microbatch_size
        evaluators.sync_weights()
        mean = _WeightedMean()
        waiting: list[SampleBatch] = []
        collected = 0
        while collected < self.settings.train_batch_size:
            for batch in evaluators.sample_round():
                self.num_steps_sampled += batch.count
                collected += batch.count
                if batch.count:
                    waiting.append(batch)
                if sum(part.count for part in waiting) >= size:
                    waiting = self._use(waiting, mean)
        if waiting:
            self._use_part(_joined(waiting), mean)
        gradients, stats = mean.result()
        evaluators.set_progress(self.num_steps_sampled)
        applying = time.perf_counter()
        evaluators.local.apply_gradients(gradients)
        self._apply_s += time.perf_counter() - applying
        self._step_s += time.perf_counter() - started
        self._steps += 1
        return stats

    def _use(self, waiting: list[SampleBatch], mean: _WeightedMean) -> list[SampleBatch]:
        """Full microbatches are used; what is left is returned."""
        rows, size = _joined(waiting), self.settings.microbatch_size
        used = 0
        while rows.count - used >= size:
            self._use_part(rows.slice(used, used + size), mean)
            used += size
        return [rows.slice(used, rows.count)] if used < rows.count else []

    def _use_part(self, part: SampleBatch, mean: _WeightedMean) -> None:
        started = time.perf_counter()
        gradients, stats = self.evaluators.local.compute_gradients(part)
        mean.add(gradients, stats, part.count)
        self.num_steps_trained += part.count
        self._gradient_s += time.perf_counter() - started

    def stats(self) -> dict[str, float]:
        """Adds ``sample_time_s``, ``gradient_time_s`` and ``apply_time_s``, means per step since the last call."""
        steps = max(1, self._steps)
        times = {
            "sample_time_s": max(0.0, self._step_s - self._gradient_s - self._apply_s) / steps,
            "gradient_time_s": self._gradient_s / steps,
            "apply_time_s": self._apply_s / steps,
        }
        self._step_s = self._gradient_s = self._apply_s = 0.0
        self._steps = 0
        return {**super().stats(), **times, "evaluator_restarts": self.evaluators.num_restarts}


class _WeightedMean:
    """Means of gradients and statistics, by rows."""

    def __init__(self) -> None:
        self._gradients: Any = None
        self._stats: dict[str, float] = {}
        self._rows = 0

    def add(self, gradients: Any, stats: dict[str, Any], rows: int) -> None:
        scaled = _map(lambda g: g * rows, gradients)
        self._gradients = scaled if self._rows == 0 else _map(lambda a, b: a + b, self._gradients, scaled)
        for name, value in stats.items():
            self._stats[name] = self._stats.get(name, 0.0) + float(value) * rows
        self._rows += rows

    def result(self) -> tuple[Any, dict[str, float]]:
        rows = self._rows
        return _map(lambda g: g / rows, self._gradients), {name: sum_ / rows for name, sum_ in self._stats.items()}


def _map(f: Any, value: Any, *others: Any) -> Any:
    """``f`` leaf by leaf; gradients may be arrays, tensors, numbers, None, or dicts, lists and tuples of them."""
    if isinstance(value, dict):
        return {k: _map(f, v, *(other[k] for other in others)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(f, *leaves) for leaves in zip(value, *others, strict=True))
    return None if value is None else f(value, *others)


def _joined(parts: list[SampleBatch]) -> SampleBatch:
    return parts[0] if len(parts) == 1 else SampleBatch.concat(parts)
