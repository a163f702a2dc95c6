"""Microbatches: the gradient on all rows, whatever the parts; every row used once and counted."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.engine import InlineEngine
from rlsample.errors import ConfigError
from rlsample.evaluation import EvaluatorSet
from rlsample.optimizers import MicrobatchOptimizer, MicrobatchSettings
from rlsample.sample_batch import SampleBatch
from rlsample.testing.row_evaluator import RowEvaluator


class Keeps(RowEvaluator):
    """Remembers the ids of each gradient, and what was applied."""

    def __init__(self, worker_index: int, sizes: Any) -> None:
        super().__init__(worker_index, sizes)
        self.seen: list[list[int]] = []
        self.applied: list[Any] = []

    def compute_gradients(self, samples: SampleBatch) -> Any:
        self.seen.append(samples["id"].tolist())
        gradients, stats = super().compute_gradients(samples)
        return {"w": gradients["w"], "nested": [gradients["w"] * 2, (3.0, None)]}, stats

    def apply_gradients(self, gradients: Any) -> None:
        self.applied.append(gradients)
        super().apply_gradients(gradients)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    workers=st.integers(0, 3),
    microbatch=st.integers(1, 30),
    more=st.integers(1, 60),
)
def test_the_mean_gradient_is_that_of_all_rows(sizes: list[int], workers: int, microbatch: int, more: int):
    engine = InlineEngine() if workers else None
    with EvaluatorSet.create(functools.partial(Keeps, sizes=sizes), workers, engine) as evaluators:
        local: Any = evaluators.local
        optimizer = MicrobatchOptimizer(evaluators, MicrobatchSettings(microbatch + more, microbatch))
        stats = optimizer.step()
    ids = [i for part in local.seen for i in part]
    assert len(ids) == len(set(ids)) == optimizer.num_steps_sampled == optimizer.num_steps_trained >= microbatch + more
    assert all(len(part) == microbatch for part in local.seen[:-1])
    assert 1 <= len(local.seen[-1]) <= microbatch
    (applied,) = local.applied
    assert applied["w"] == pytest.approx([np.mean(ids), 1.0])
    assert applied["nested"][0] == pytest.approx([2 * np.mean(ids), 2.0])
    assert applied["nested"][1] == (3.0, None)
    assert stats == {"loss": pytest.approx(np.mean(ids))}


def test_it_is_the_full_batch_gradient_of_a_torch_policy():
    from rlsample.policy import A2CPolicy

    rng = np.random.default_rng(0)
    spaces = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(3)
    rows = SampleBatch(
        {
            "obs": rng.uniform(-1, 1, (50, 4)).astype(np.float32),
            "actions": rng.integers(0, 3, 50),
            "advantages": rng.normal(size=50).astype(np.float32),
            "value_targets": rng.normal(size=50).astype(np.float32),
            "values": rng.normal(size=50).astype(np.float32),
        }
    )

    class Once(RowEvaluator):
        policy = A2CPolicy(*spaces, seed=1)
        applied: Any = None

        def sample(self) -> SampleBatch:
            return rows

        def compute_gradients(self, samples: SampleBatch) -> Any:
            return self.policy.compute_gradients(samples)

        def apply_gradients(self, gradients: Any) -> None:
            self.applied = gradients

    once = Once()
    MicrobatchOptimizer(EvaluatorSet(once), MicrobatchSettings(50, 16)).step()
    expected, _ = once.policy.compute_gradients(rows)
    assert set(once.applied) == set(expected)
    for name, gradient in expected.items():
        np.testing.assert_allclose(once.applied[name], gradient, rtol=0, atol=1e-6)
        assert once.applied[name].dtype == np.float32


def test_case_24_steps_are_counted_from_the_data():
    with EvaluatorSet.create(RowEvaluator, 0) as evaluators:
        optimizer = MicrobatchOptimizer(evaluators, MicrobatchSettings(25, 10))
        optimizer.step()
    assert (optimizer.num_steps_sampled, optimizer.num_steps_trained) == (25, 25)


@pytest.mark.parametrize("sizes", [(100, 100), (100, 101), (100, 0)])
def test_a_microbatch_must_be_smaller_than_the_batch(sizes: tuple[int, int]):
    with pytest.raises(ConfigError, match="microbatch_size"):
        MicrobatchSettings(*sizes)
    assert (MicrobatchSettings().train_batch_size, MicrobatchSettings().microbatch_size) == (10_000, 1_000)
