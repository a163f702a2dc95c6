"""Batches and supports whose every number can be told apart."""

from __future__ import annotations

import numpy as np
import pytest

from rlsample.evaluation import PolicyEvaluator
from rlsample.sample_batch import NextObs, SampleBatch


def make_batch(first_id: int, lengths: list[int], ends: str = "cut", dtype=np.float32) -> SampleBatch:
    """Fragments side by side; row i of all has id ``first_id + i``, in every column in another form.

    Each fragment's last row has an extra next observation, ``-id`` of that row; in reverse order, so that an
    off-by-one shows.
    """
    count = sum(lengths)
    ids = np.arange(first_id, first_id + count)
    index = np.arange(1, count + 1)
    stops = np.cumsum([n for n in lengths if n]).astype(int)
    index[stops - 1] = -1 - np.arange(len(stops))[::-1]
    extra = -(ids[stops - 1][::-1])
    terminated = np.zeros(count, bool)
    terminated[stops - 1] = ends == "terminated"
    columns = {
        "obs": np.stack([ids, ids * 2], 1).astype(dtype),
        "actions": (ids % 7).astype(np.int64),
        "rewards": ids.astype(np.float32) / 8,
        "terminated": terminated,
        "id": ids.astype(np.int64),
        "policy_version": np.full(count, 0, np.int64),
        "eps_id": np.repeat(np.arange(len(lengths)), lengths) + 1000 * first_id,
        "t": np.concatenate([np.arange(n) for n in lengths] or [[]]),
    }
    next_obs = NextObs(index, np.stack([extra, extra * 2], 1).astype(dtype))
    return SampleBatch(columns, next_obs, np.array(lengths))


class Bare(PolicyEvaluator):
    """What must be there, and nothing else."""

    def sample(self): ...
    def compute_gradients(self, samples): ...
    def apply_gradients(self, gradients): ...
    def get_weights(self): ...
    def set_weights(self, weights): ...


@pytest.fixture(name="make_batch")
def _make_batch():
    return make_batch
