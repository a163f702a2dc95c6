"""The copies on further devices take the first one's updates, whatever happens to that one in between."""

import functools
import sys

import cloudpickle
import numpy as np
import pytest
import torch

from rlsample.errors import LearnerError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.optimizers import MultiGPUOptimizer, MultiGPUSettings, SyncSamplesOptimizer, SyncSamplesSettings
from rlsample.optimizers.device_group import DeviceGroup, DeviceSettings
from rlsample.policy import ModelSettings, PPOPolicy, PPOSettings

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LEARNING = {"train_batch_size": 0, "num_sgd_iter": 2, "minibatch_size": 0}
SCHEDULES = {"lr_schedule": "linear", "clip_range_schedule": "linear", "schedule_steps": 400}


def cartpole():
    settings = PPOSettings(model=ModelSettings(hidden=(16,)), learning_rate=0.01, **SCHEDULES)
    policy = functools.partial(PPOPolicy, settings=settings)
    return CommonPolicyEvaluator("CartPole-v1", policy, 2, rollout_fragment_length=24, seed=4)


def assert_same(a, b, tolerance=0.0):
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=tolerance, rtol=0, err_msg=name)


def trained_on_one(steps, state=None):
    """The evaluator's state after some steps; from a given one on."""
    with EvaluatorSet(cartpole()) as evaluators:
        optimizer = SyncSamplesOptimizer(evaluators, SyncSamplesSettings(**LEARNING), seed=1)
        if state is not None:
            evaluators.local.set_state(state)
        for _ in range(steps):
            optimizer.step()
        return evaluators.local.get_state()


def test_copies_take_part_in_a_resume_and_follow_schedules():
    """A resumed run reads its checkpoint when the optimizer and its devices are there already."""
    start = trained_on_one(2)
    wanted = trained_on_one(3, start)["policy"]["weights"]
    settings = MultiGPUSettings(devices=("cpu", "cpu"), **LEARNING)
    with EvaluatorSet(cartpole()) as evaluators, MultiGPUOptimizer(evaluators, settings, seed=1) as optimizer:
        evaluators.local.set_state(start)
        for _ in range(3):
            optimizer.step()
        mine, other = optimizer._group.weights_by_device()
    assert_same(mine, other)
    assert_same(mine, wanted, 1e-6)


class FailsHere:
    """A loss that fails on the first device, once; the gradient is the mean id."""

    columns = ("id",)
    whole_fragments = False

    def __init__(self):
        self.module = torch.nn.Linear(1, 1, bias=False)
        self.gradients, self.fail = [], False

    def loss(self, rows):
        if self.fail:
            self.fail = False
            raise ArithmeticError("here")
        loss = self.module.weight.sum() * rows["id"].float().mean()
        return loss, {"loss": loss}

    def update(self):
        self.gradients.append(float(self.module.weight.grad))

    def to(self, device):
        return self


def load_and_train(group, batch):
    group.load(0, [batch])
    group.train_pass(0)


def test_after_a_failure_on_the_first_device_no_sum_mixes_two_batches(make_batch):
    support = FailsHere()
    with DeviceGroup(support, DeviceSettings(("cpu", "cpu"))) as group:
        group.load(0, [make_batch(0, [10])])
        group.train_pass(0)
        assert support.gradients == [4.5]
        support.fail = True
        group.load(0, [make_batch(100, [10])])
        with pytest.raises(ArithmeticError, match="here"):
            group.train_pass(0)
        with pytest.raises(LearnerError, match="ArithmeticError: here"):
            load_and_train(group, make_batch(200, [10]))
        assert support.gradients == [4.5]
