"""Synchronous training from a replay buffer (DQN)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.optimizers.learner_stats import mean_stats
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.optimizers.replay_buffer import REPLAY_ID, PrioritizedReplayBuffer, PrioritySettings, ReplayBuffer
from rlsample.sample_batch import SampleBatch
from rlsample.settings import check_at_least, option

__all__ = ["TD_ERRORS", "ReplaySettings", "SyncReplayOptimizer", "SyncReplaySettings", "make_buffer"]

log = logging.getLogger(__name__)

TD_ERRORS = "td_errors"


@dataclass(frozen=True)
class ReplaySettings(PrioritySettings):
    """Options of optimizers that replay rows."""

    learning_starts: int = option(1000, "rows in the replay buffer before learning begins")
    buffer_size: int = option(10_000, "rows the replay buffer holds")
    train_batch_size: int = option(32, "replayed rows of one update")
    prioritized_replay: bool = option(True, "draw rows by their TD errors; false: all alike")
    replay_columns: tuple[str, ...] = option((), "columns to keep for replay; none: all (next_obs is always kept)")
    store_buffer_in_checkpoints: bool = option(
        False, "save the replayed rows too, so that a resumed run need not collect them again (dqn: bit for bit): large"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, {"learning_starts": 0, "buffer_size": 1, "train_batch_size": 1})
        if self.learning_starts > self.buffer_size:
            raise ConfigError(
                f"learning_starts {self.learning_starts} is never reached: buffer_size is {self.buffer_size}"
            )


@dataclass(frozen=True)
class SyncReplaySettings(ReplaySettings):
    """Options of :class:`SyncReplayOptimizer`."""

    updates_per_step: int = option(1, "updates after each round of samples")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, {"updates_per_step": 1})


def make_buffer(settings: ReplaySettings, seed: Any, buffer_size: int | None = None) -> ReplayBuffer:
    """The buffer these settings describe.

    Args:
        buffer_size: in place of the settings' own.
    """
    size, columns = buffer_size or settings.buffer_size, settings.replay_columns or None
    if settings.prioritized_replay:
        return PrioritizedReplayBuffer(size, columns, seed, settings)
    return ReplayBuffer(size, columns, seed)


class SyncReplayOptimizer(PolicyOptimizer):
    """One sample of each evaluator goes into a replay buffer; then the local evaluator learns on rows drawn from it.

    Learning begins once ``learning_starts`` rows are in the buffer: after a resume without a stored buffer, too. With
    ``prioritized_replay`` the evaluator's ``compute_apply`` returns ``td_errors``, float[N], beside its statistics:
    they become the priorities of its rows. An evaluator that returns none leaves the priorities as they are.

    Args:
        evaluators: the remote ones sample, or the local one where there are none.
        seed: of the draws.
        before_learn_on_batch: a function of each replayed batch that returns what to learn on.
    """

    def __init__(
        self,
        evaluators: EvaluatorSet,
        settings: SyncReplaySettings | None = None,
        seed: int | None = 0,
        before_learn_on_batch: Callable[[SampleBatch], SampleBatch] | None = None,
    ) -> None:
        super().__init__(evaluators)
        self.settings = settings or SyncReplaySettings()
        self.buffer = make_buffer(self.settings, seed)
        self._change_batch = before_learn_on_batch
        self._seconds = dict.fromkeys(("sample", "add", "replay", "learn"), 0.0)
        self._steps = 0
        self._warned = False

    def step(self) -> dict[str, float]:
        """Samples, then learns; statistics are means over the updates, and empty before learning starts."""
        self.evaluators.sync_weights()
        began = time.perf_counter()
        for batch in self.evaluators.sample_round():
            began = self._spent("sample", began)
            self.num_steps_sampled += batch.count
            self.buffer.add(batch)
            began = self._spent("add", began)
        self.evaluators.set_progress(self.num_steps_sampled)
        self._steps += 1
        if len(self.buffer) < max(1, self.settings.learning_starts):
            return {}
        return mean_stats([self._update() for _ in range(self.settings.updates_per_step)])

    def _update(self) -> dict[str, Any]:
        began = time.perf_counter()
        size = self.settings.train_batch_size
        if isinstance(self.buffer, PrioritizedReplayBuffer):
            batch = self.buffer.sample(size, self.settings.beta(self.num_steps_sampled))
        else:
            batch = self.buffer.sample(size)
        if self._change_batch is not None:
            batch = self._change_batch(batch)
        began = self._spent("replay", began)
        stats = dict(self.evaluators.local.compute_apply(batch))
        self.num_steps_trained += batch.count
        errors = stats.pop(TD_ERRORS, None)
        began = self._spent("learn", began)
        if isinstance(self.buffer, PrioritizedReplayBuffer):
            if errors is not None:
                self.buffer.update_priorities(batch[REPLAY_ID], np.asarray(errors))
            elif not self._warned:
                self._warned = True
                log.warning(
                    "prioritized_replay: the evaluator returns no td_errors, so that priorities stay as they are"
                )
        self._spent("replay", began)
        return stats

    def _spent(self, name: str, began: float) -> float:
        now = time.perf_counter()
        self._seconds[name] += now - began
        return now

    def stats(self) -> dict[str, float]:
        """Adds:

        * ``sample_time_s, add_time_s, replay_time_s, learn_time_s``: means per step since the last call;
        * ``replay_rows, replay_bytes``: in the buffer now;
        * ``evaluator_restarts``: of the whole run.
        """
        steps = max(1, self._steps)
        times = {f"{name}_time_s": seconds / steps for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._steps = 0
        buffer = {"replay_rows": len(self.buffer), "replay_bytes": self.buffer.nbytes}
        return {**super().stats(), **times, **buffer, "evaluator_restarts": self.evaluators.num_restarts}

    def save(self) -> dict[str, Any]:
        """Counters, and the buffer if ``store_buffer_in_checkpoints`` is set."""
        stored = self.settings.store_buffer_in_checkpoints
        return {**super().save(), "buffer": self.buffer.get_state() if stored else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["buffer"] is not None:
            self.buffer.set_state(state["buffer"])
        super().restore(state)
