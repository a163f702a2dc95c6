"""An evaluator without an env or a policy, whose every row, weight and update is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlsample.evaluation.metrics import EpisodeMetrics
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.sample_batch import SampleBatch

__all__ = ["RowEvaluator"]

_IDS = 1_000_000


class RowEvaluator(PolicyEvaluator):
    """Samples of given sizes, in turn: the rows of the evaluator with index w have the ids w * 1,000,000 and up.

    Each sample is one episode with its size as length and return. The "gradient" of a batch is its mean id and 1;
    applying it adds both to the two weights, so that the second one counts updates. ``loss`` is the mean id.

    Args:
        worker_index: w.
        sizes: rows of each sample.
    """

    def __init__(self, worker_index: int = 0, sizes: Sequence[int] = (7, 13, 5)) -> None:
        self.worker_index, self.sizes = worker_index, tuple(sizes)
        self.num_samples = 0
        self.weights = np.zeros(2)
        self._next_id = worker_index * _IDS
        self._episodes: list[EpisodeMetrics] = []

    def sample(self) -> SampleBatch:
        size = self.sizes[self.num_samples % len(self.sizes)]
        ids = np.arange(self._next_id, self._next_id + size)
        episode = self._next_id
        self._next_id += size
        self.num_samples += 1
        self._episodes.append(EpisodeMetrics(float(size), size, 0, episode, self.worker_index))
        ends = np.arange(size) == size - 1
        return SampleBatch(
            {
                "id": ids,
                "obs": ids.astype(np.float32)[:, None],
                "next_obs": ids.astype(np.float32)[:, None] + 1,
                "actions": ids % 2,
                "rewards": (ids % 5).astype(np.float32),
                "terminated": ends,
                "truncated": np.zeros(size, bool),
                "eps_id": np.full(size, episode),
                "t": np.arange(size),
                "update": np.full(size, self.weights[1]),
            }
        )

    def compute_gradients(self, samples: SampleBatch) -> tuple[Any, dict[str, Any]]:
        mean = float(samples["id"].mean())
        return {"w": np.array([mean, 1.0])}, {"loss": mean}

    def apply_gradients(self, gradients: Any) -> None:
        self.weights = self.weights + gradients["w"]

    def get_weights(self) -> Any:
        return {"w": self.weights.copy()}

    def set_weights(self, weights: Any) -> None:
        self.weights = weights["w"].copy()

    def get_metrics(self) -> list[Any]:
        episodes, self._episodes = self._episodes, []
        return episodes
