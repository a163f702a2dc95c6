"""MultiGPUOptimizer: SyncSamplesOptimizer's update on devices, with counts of what the loss saw."""

import functools

import numpy as np
import pytest

from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.optimizers import SyncSamplesOptimizer, SyncSamplesSettings
from rlsample.optimizers.multi_gpu_optimizer import MultiGPUOptimizer, MultiGPUSettings, standardize_over
from rlsample.policy import ModelSettings, PPOPolicy, PPOSettings
from rlsample.sample_batch import SampleBatch

from .conftest import Bare


def cartpole(fragment=24, num_envs=2):
    policy = functools.partial(PPOPolicy, settings=PPOSettings(model=ModelSettings(hidden=(16,))))
    return CommonPolicyEvaluator("CartPole-v1", policy, num_envs, rollout_fragment_length=fragment, seed=4)


def weights_after(optimizer_class, settings, steps=2):
    with EvaluatorSet(cartpole()) as evaluators, optimizer_class(evaluators, settings, seed=1) as optimizer:
        for _ in range(steps):
            stats = optimizer.step()
        return evaluators.local.get_weights(), optimizer.num_steps_trained, stats, optimizer.stats()


def assert_close(a, b):
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=1e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize("num_devices", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_whole_batch_updates_are_those_of_the_synchronous_optimizer(num_devices):
    options = {"train_batch_size": 90, "num_sgd_iter": 3, "minibatch_size": 0, "standardize_fields": ("advantages",)}
    wanted, trained, stats, _ = weights_after(SyncSamplesOptimizer, SyncSamplesSettings(**options))
    several = MultiGPUSettings(devices=("cpu",) * num_devices, **options)
    got, rows, numbers, counters = weights_after(MultiGPUOptimizer, several)
    assert_close(got, wanted)
    assert rows == trained == 2 * 3 * 96
    assert counters["num_steps_sampled"] == 2 * 96
    assert numbers["loss"] == pytest.approx(stats["loss"], abs=1e-5)


def test_rows_left_over_are_not_counted_as_trained():
    settings = MultiGPUSettings(devices=("cpu", "cpu", "cpu"), train_batch_size=0, num_sgd_iter=2, minibatch_size=32)
    with (
        EvaluatorSet(cartpole(fragment=50)) as evaluators,
        MultiGPUOptimizer(evaluators, settings) as optimizer,
    ):
        optimizer.step()
        assert optimizer.num_steps_sampled == 100
        assert optimizer.num_steps_trained == 2 * 99
        assert optimizer.stats()["num_dropped_rows"] == 1
        assert evaluators.local.policy.version == 2 * 4  # minibatches of 30, 30, 30 and 9


def test_a_minibatch_larger_than_the_batch_is_one_update_of_all_rows():
    settings = MultiGPUSettings(train_batch_size=0, num_sgd_iter=2, minibatch_size=256)
    with EvaluatorSet(cartpole(fragment=50)) as evaluators, MultiGPUOptimizer(evaluators, settings) as optimizer:
        optimizer.step()
        assert optimizer.num_steps_trained == 200
        assert evaluators.local.policy.version == 2


def test_minibatches_cover_every_row_and_resume():
    settings = MultiGPUSettings(train_batch_size=0, num_sgd_iter=2, minibatch_size=20)
    with EvaluatorSet(cartpole()) as evaluators, MultiGPUOptimizer(evaluators, settings) as optimizer:
        optimizer.step()
        assert optimizer.num_steps_trained == 2 * 48
        state = optimizer.save(), evaluators.local.get_state()
        optimizer.step()
        wanted = evaluators.local.get_weights()
    with EvaluatorSet(cartpole()) as evaluators, MultiGPUOptimizer(evaluators, settings) as optimizer:
        optimizer.restore(state[0])
        evaluators.local.set_state(state[1])
        optimizer.step()
        for name, array in evaluators.local.get_weights().items():
            np.testing.assert_array_equal(array, wanted[name])


def test_standardized_over_all_fragments():
    rng = np.random.default_rng(0)
    batches = [SampleBatch({"advantages": rng.normal(3, 2, n), "other": np.arange(n)}) for n in (3, 5)]
    before = [batch["advantages"].copy() for batch in batches]
    scaled = standardize_over(batches, "advantages")
    joined = np.concatenate([batch["advantages"] for batch in scaled])
    assert joined.dtype == np.float32
    assert joined.mean() == pytest.approx(0, abs=1e-6)
    assert joined.std() == pytest.approx(1, abs=1e-5)
    assert [batch.count for batch in scaled] == [3, 5]
    for batch, old, kept in zip(scaled, before, batches, strict=True):
        assert batch["other"] is kept["other"]
        np.testing.assert_array_equal(kept["advantages"], old)  # the caller's batches are as they were


def test_without_the_capability_it_refuses():
    with pytest.raises(ConfigError, match=r"Bare cannot be trained from loaded rows: give it a method"):
        MultiGPUOptimizer(EvaluatorSet(Bare()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_sgd_iter": 0}, "num_sgd_iter 1 or more"),
        ({"devices": ("cpu", "cpu"), "minibatch_size": 1}, "less than a row for each device"),
        ({"devices": ("cpu", "cuda:0")}, "different kinds"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        MultiGPUSettings(**options)
