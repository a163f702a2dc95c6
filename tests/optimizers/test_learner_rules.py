"""The optimizers with a learner thread or devices keep the rules of the public suite."""

import functools

import pytest

from rlsample.engine import InlineEngine, ProcessEngine, ThreadEngine
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.optimizers import AsyncSamplesOptimizer, AsyncSamplesSettings, MultiGPUOptimizer, MultiGPUSettings
from rlsample.policy import IMPALAPolicy, PPOPolicy
from rlsample.testing.optimizer_rules import OPTIMIZER_RULES, check_optimizer
from rlsample.testing.row_evaluator import RowEvaluator

ALL_OK = dict.fromkeys(OPTIMIZER_RULES, "ok")
LOSS_ELSEWHERE = {
    1: "the loss was not computed by the evaluators: num_steps_trained was not checked",
    5: "the loss was not computed by the evaluators",
}
REPLAY = {"replay_proportion": 1.0, "replay_buffer_num_slots": 4, "num_sgd_iter": 2, "minibatch_buffer_size": 2}


def make_cartpole(policy, worker_index):
    return CommonPolicyEvaluator(
        "CartPole-v1", policy, num_envs=2, rollout_fragment_length=8, seed=3, worker_index=worker_index
    )


def async_samples(evaluators, **options):
    return AsyncSamplesOptimizer(evaluators, AsyncSamplesSettings(train_batch_size=10, **options))


@pytest.mark.parametrize("engine", [InlineEngine, ThreadEngine])
@pytest.mark.parametrize("options", [{}, REPLAY, {"when_full": "drop_oldest", "learner_queue_size": 1}])
def test_async_samples(options, engine):
    make = functools.partial(async_samples, **options)
    report = check_optimizer(make, RowEvaluator, make_engine=engine, background=True)
    assert report == {**ALL_OK, 8: "workers are no processes", 9: "needs remote evaluators"}


def test_async_samples_with_loaders():
    make = functools.partial(async_samples, num_data_loader_buffers=2)
    report = check_optimizer(make, functools.partial(make_cartpole, IMPALAPolicy), background=True)
    assert report == {**ALL_OK, **LOSS_ELSEWHERE, 8: "workers are no processes", 9: "needs remote evaluators"}


def test_an_evaluator_is_killed_in_the_middle_of_a_sample():
    report = check_optimizer(async_samples, RowEvaluator, [8], make_engine=ProcessEngine, background=True, mortal=True)
    assert report == {8: "ok"}


@pytest.mark.slow  # among the others: test_async_samples.py kills one of a learner with loaders and two devices
def test_an_evaluator_is_killed_in_the_middle_of_a_sample_with_loaders():
    make = functools.partial(async_samples, num_data_loader_buffers=2)
    evaluator = functools.partial(make_cartpole, IMPALAPolicy)
    report = check_optimizer(make, evaluator, [8], make_engine=ProcessEngine, background=True, mortal=True)
    assert report == {8: "ok"}


def test_an_evaluator_is_killed_in_the_middle_of_a_sample_of_multi_gpu():
    settings = MultiGPUSettings(train_batch_size=10, num_sgd_iter=2, minibatch_size=4)
    make = functools.partial(make_cartpole, PPOPolicy)
    report = check_optimizer(
        lambda evaluators: MultiGPUOptimizer(evaluators, settings), make, [8], make_engine=ProcessEngine, mortal=True
    )
    assert report == {8: "ok"}


def test_multi_gpu():
    settings = MultiGPUSettings(train_batch_size=10, num_sgd_iter=2, minibatch_size=4)
    make = functools.partial(make_cartpole, PPOPolicy)
    report = check_optimizer(lambda evaluators: MultiGPUOptimizer(evaluators, settings), make, make_engine=InlineEngine)
    assert report == {**ALL_OK, **LOSS_ELSEWHERE, 8: "workers are no processes"}
