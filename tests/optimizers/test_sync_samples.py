"""The synchronous optimizer with fake evaluators: rows are counted, each pass uses each row once, errors come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlsample.errors import ConfigError
from rlsample.evaluation import EvaluatorSet, PolicyEvaluator, SampleBatch
from rlsample.optimizers import SyncSamplesOptimizer, SyncSamplesSettings


class Fake(PolicyEvaluator):
    """Returns batches of the given sizes in turn, with ids as rows; its loss records the ids it sees."""

    def __init__(self, sizes: list[int], first_id: int = 0):
        self.sizes, self.next_id, self.weights, self.updates = list(sizes), first_id, 0, []
        self.got_weights: list[Any] = []

    def sample(self) -> SampleBatch:
        size = self.sizes.pop(0)
        ids = np.arange(self.next_id, self.next_id + size)
        self.next_id += size
        return SampleBatch({"id": ids, "obs": ids.astype(np.float32)[:, None], "advantages": ids.astype(np.float32)})

    def compute_gradients(self, samples: SampleBatch):
        assert (samples["obs"][:, 0] == samples["id"]).all()
        self.updates.append(samples["id"].tolist())
        return samples.count, {"loss": float(samples["id"].mean()), "mean": float(samples["advantages"].mean())}

    def apply_gradients(self, gradients: Any) -> None:
        self.weights += gradients

    def get_weights(self) -> Any:
        return self.weights

    def set_weights(self, weights: Any) -> None:
        self.got_weights.append(weights)

    def get_metrics(self) -> list[Any]:
        return [f"episode of {self.next_id}"]


def test_case_24_steps_are_counted_from_the_data():
    fake = Fake([7, 13, 5])
    with SyncSamplesOptimizer(EvaluatorSet(fake)) as optimizer:
        for _ in range(3):
            optimizer.step()
    assert (optimizer.num_steps_sampled, optimizer.num_steps_trained) == (25, 25)
    assert [len(ids) for ids in fake.updates] == [7, 13, 5]


def test_case_25_minibatches_use_each_row_once_per_pass():
    fake = Fake([100])
    optimizer = SyncSamplesOptimizer(EvaluatorSet(fake), SyncSamplesSettings(minibatch_size=32, num_sgd_iter=2))
    stats = optimizer.step()
    assert [len(ids) for ids in fake.updates] == [32, 32, 32, 4] * 2
    passes = [[i for ids in half for i in ids] for half in (fake.updates[:4], fake.updates[4:])]
    assert [sorted(ids) for ids in passes] == [list(range(100))] * 2
    assert passes[0] != passes[1]
    assert passes[0] != list(range(100))
    assert optimizer.num_steps_trained == 200 == fake.weights
    assert stats["loss"] == pytest.approx(np.mean([np.mean(ids) for ids in fake.updates[4:]]))


def test_case_25_a_minibatch_larger_than_the_batch_is_the_batch():
    fake = Fake([100])
    SyncSamplesOptimizer(EvaluatorSet(fake), SyncSamplesSettings(minibatch_size=256, num_sgd_iter=2)).step()
    assert [sorted(ids) for ids in fake.updates] == [list(range(100))] * 2


def test_the_same_seed_shuffles_alike_and_the_state_resumes():
    runs = []
    for seed in (1, 1, 2):
        fake = Fake([10])
        SyncSamplesOptimizer(EvaluatorSet(fake), SyncSamplesSettings(minibatch_size=4), seed=seed).step()
        runs.append(fake.updates)
    assert runs[0] == runs[1] != runs[2]
    fake, again = Fake([10, 10]), Fake([10])
    first = SyncSamplesOptimizer(EvaluatorSet(fake), SyncSamplesSettings(minibatch_size=4), seed=1)
    first.step()
    saved = first.save()
    first.step()
    resumed = SyncSamplesOptimizer(EvaluatorSet(again), SyncSamplesSettings(minibatch_size=4), seed=9)
    resumed.restore(saved)
    resumed.step()
    assert [[i - 10 for i in ids] for ids in fake.updates[3:]] == again.updates
    assert resumed.num_steps_sampled == 20


def test_samples_until_the_train_batch_is_full_from_all_evaluators():
    local, a, b = Fake([]), Fake([7, 13]), Fake([5, 3], first_id=1000)
    optimizer = SyncSamplesOptimizer(EvaluatorSet(local, [a, b]), SyncSamplesSettings(train_batch_size=20))
    optimizer.step()
    assert optimizer.num_steps_sampled == 28
    assert local.updates == [[*range(7), *range(1000, 1005), *range(7, 20), *range(1005, 1008)]]
    assert a.got_weights == b.got_weights == [0]
    assert local.got_weights == []


def test_standardized_fields():
    fake = Fake([10])
    settings = SyncSamplesSettings(standardize_fields=("advantages",))
    stats = SyncSamplesOptimizer(EvaluatorSet(fake), settings).step()
    assert stats["mean"] == pytest.approx(0.0, abs=1e-6)


def test_an_error_in_sampling_comes_out_and_the_counters_hold_what_was_done():
    fake = Fake([7])
    optimizer = SyncSamplesOptimizer(EvaluatorSet(fake))
    optimizer.step()
    with pytest.raises(IndexError):
        optimizer.step()
    assert (optimizer.num_steps_sampled, optimizer.num_steps_trained) == (7, 7)


@pytest.mark.parametrize("options", [{"num_sgd_iter": 0}, {"minibatch_size": -1}, {"train_batch_size": -5}])
def test_impossible_settings(options: dict[str, int]):
    with pytest.raises(ConfigError):
        SyncSamplesSettings(**options)


def test_the_set_gathers_metrics_and_closes_all_also_after_an_error():
    closed = []

    class Closing(Fake):
        def close(self) -> None:
            closed.append(self.next_id)
            if self.next_id == 1:
                raise OSError("close-1")

    evaluators = EvaluatorSet(Closing([], 0), [Closing([], 1), Closing([], 2)])
    assert evaluators.get_metrics() == ["episode of 0", "episode of 1", "episode of 2"]
    assert evaluators.foreach_evaluator_with_index(lambda e, i: (e.next_id, i)) == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(OSError, match="close-1"):
        evaluators.close()
    assert closed == [0, 1, 2]
