"""Field case 26, third form: the thread in which an evaluator samples ahead raises, and step() tells, whoever steps."""

import functools
import time
from typing import Any

import pytest

from rlsample.engine import ThreadEngine
from rlsample.errors import EnvFailedError, SamplerError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.optimizers import (
    AsyncGradientsOptimizer,
    AsyncReplayOptimizer,
    AsyncReplaySettings,
    AsyncSamplesOptimizer,
    AsyncSamplesSettings,
    MicrobatchOptimizer,
    MicrobatchSettings,
    MultiGPUOptimizer,
    MultiGPUSettings,
    SyncReplayOptimizer,
    SyncReplaySettings,
    SyncSamplesOptimizer,
)
from rlsample.policy import A2CPolicy, DQNPolicy, IMPALAPolicy, PPOPolicy
from rlsample.testing.scripted import CountEnv

REPLAY = {"learning_starts": 8, "train_batch_size": 4}
CASES: dict[str, tuple[Any, Any]] = {
    "sync": (A2CPolicy, SyncSamplesOptimizer),
    "async gradients": (A2CPolicy, AsyncGradientsOptimizer),
    "microbatch": (A2CPolicy, lambda e: MicrobatchOptimizer(e, MicrobatchSettings(8, 4))),
    "multi gpu": (PPOPolicy, lambda e: MultiGPUOptimizer(e, MultiGPUSettings(train_batch_size=8))),
    "async samples": (IMPALAPolicy, lambda e: AsyncSamplesOptimizer(e, AsyncSamplesSettings(train_batch_size=8))),
    "replay": (DQNPolicy, lambda e: SyncReplayOptimizer(e, SyncReplaySettings(**REPLAY))),
    "apex": (DQNPolicy, lambda e: AsyncReplayOptimizer(e, AsyncReplaySettings(**REPLAY))),
}


class Fails(CountEnv):
    """Raises in its 30th step."""

    def step(self, action: Any) -> Any:
        if self.steps == 29:
            raise FloatingPointError("nan-7")
        return super().step(action)


def make_evaluator(policy: Any, worker_index: int) -> CommonPolicyEvaluator:
    env = Fails if worker_index == 1 else CountEnv
    return CommonPolicyEvaluator(
        lambda ctx: env(5, "term"), policy, rollout_fragment_length=4, worker_index=worker_index, sample_async=True
    )


def step_for_ever(optimizer: Any) -> None:
    while True:
        optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_case_26_a_sampling_thread_that_raises(name: str):
    policy, make_optimizer = CASES[name]
    with (
        EvaluatorSet.create(functools.partial(make_evaluator, policy), 2, ThreadEngine(copies=False)) as evaluators,
        make_optimizer(evaluators) as optimizer,
    ):
        started = time.monotonic()
        with pytest.raises(SamplerError, match="nan-7") as caught:
            step_for_ever(optimizer)
        assert time.monotonic() - started < 10
        assert isinstance(caught.value.__cause__, EnvFailedError)
        assert optimizer.num_steps_sampled >= 4
        started = time.monotonic()
        optimizer.close()
        assert time.monotonic() - started < 5
