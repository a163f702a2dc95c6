"""DQN by hand: sample CartPole, replay rows by their TD errors. `--quick`: a few seconds."""

import sys
import time

import numpy as np
import torch

from rlsample import CommonPolicyEvaluator
from rlsample.evaluation import EvaluatorSet
from rlsample.optimizers import SyncReplayOptimizer, SyncReplaySettings
from rlsample.policy import DQNPolicy, DQNSettings

torch.set_num_threads(1)  # nets of this size are fastest with one
QUICK = "--quick" in sys.argv
POLICY = DQNSettings(learning_rate=5e-4, n_step=3, target_update_interval=250)


def make_policy(observation_space, action_space, seed):
    return DQNPolicy(observation_space, action_space, POLICY, seed)


settings = SyncReplaySettings(
    buffer_size=50_000,
    train_batch_size=128,
    updates_per_step=4,
    replay_columns=("obs", "actions", "nstep_returns", "nstep_discounts"),  # what DQN learns from
)
evaluator = CommonPolicyEvaluator("CartPole-v1", make_policy, num_envs=8, rollout_fragment_length=4, seed=0)
with EvaluatorSet(evaluator) as evaluators, SyncReplayOptimizer(evaluators, settings) as optimizer:
    started, returns = time.perf_counter(), []
    for step in range(1, 91 if QUICK else 2001):
        learned = optimizer.step()
        returns += [episode.episode_return for episode in evaluators.get_metrics()]
        if step % (45 if QUICK else 100) == 0:
            print(
                f"{time.perf_counter() - started:5.1f} s  {optimizer.num_steps_sampled:6,} steps  "
                f"return {np.mean(returns[-30:]):5.1f}  loss {learned['loss']:.3f}  epsilon {learned['epsilon']:.2f}"
            )
