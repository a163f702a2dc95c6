"""IMPALA by hand: two processes sample CartPole while a thread learns. `--quick`: a few updates only."""

import sys
import time

import numpy as np

from rlsample import CommonPolicyEvaluator
from rlsample.evaluation import EvaluatorSet
from rlsample.optimizers import AsyncSamplesOptimizer, AsyncSamplesSettings
from rlsample.policy import IMPALAPolicy, IMPALASettings

QUICK = "--quick" in sys.argv
POLICY = IMPALASettings(
    gamma=0.995, learning_rate=1.5e-3, lr_schedule="linear", schedule_steps=600_000, max_grad_norm=0.5, ent_coef=0.0
)


def make_policy(observation_space, action_space, seed):
    return IMPALAPolicy(observation_space, action_space, POLICY, seed)


def make_evaluator(worker_index):
    return CommonPolicyEvaluator(
        "CartPole-v1",
        make_policy,
        num_envs=8,
        rollout_fragment_length=32,
        clip_rewards=0.05,  # they are all 1: values stay small, see docs/algorithms.md
        seed=0,
        worker_index=worker_index,
    )


settings = AsyncSamplesSettings(train_batch_size=256, learner_queue_size=2)
with (
    EvaluatorSet.create(make_evaluator, num_workers=2) as evaluators,
    AsyncSamplesOptimizer(evaluators, settings) as optimizer,
):
    started, returns = time.perf_counter(), []
    while optimizer.num_updates < (30 if QUICK else 3000):
        optimizer.step()
        returns += [episode.episode_return for episode in evaluators.get_metrics()]
        if optimizer.num_updates % (10 if QUICK else 100) == 0:
            stats, recent = optimizer.stats(), np.mean(returns[-100:] or [0])
            print(
                f"{time.perf_counter() - started:5.1f} s  {optimizer.num_steps_sampled:7,} steps  "
                f"return {recent:5.1f}  lag {stats['policy_lag_mean']:.1f}  "
                f"learner waits {stats['learner_wait_share']:.0%} of its time"
            )
            if recent >= 475:
                break
