"""The algorithms by name, with defaults for any env and tuned ones for a few.

Options are flat: an option's name is unique over all settings, so a table names it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsample.errors import unknown_name
from rlsample.evaluation import EvaluatorSet
from rlsample.optimizers import (
    AsyncGradientsOptimizer,
    AsyncGradientsSettings,
    AsyncReplayOptimizer,
    AsyncReplaySettings,
    AsyncSamplesOptimizer,
    AsyncSamplesSettings,
    PolicyOptimizer,
    SyncReplayOptimizer,
    SyncReplaySettings,
    SyncSamplesOptimizer,
    SyncSamplesSettings,
)
from rlsample.policy import (
    A2CPolicy,
    A2CSettings,
    APPOPolicy,
    APPOSettings,
    DQNPolicy,
    DQNSettings,
    IMPALAPolicy,
    IMPALASettings,
    PPOPolicy,
    PPOSettings,
)

__all__ = ["ALGORITHMS", "Algorithm", "find_algorithm"]

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Algorithm:
    """A policy and an optimizer with their settings, and which options to start from.

    Attributes:
        make_policy: ``(observation_space, action_space, settings=..., seed=...)`` -> Policy.
        policy_settings: the settings class of that policy.
        defaults: option -> value, for envs without an entry in ``tuned``.
        tuned: env id -> option -> value, on top of the defaults.
        make_optimizer: ``(evaluators, settings, seed)`` -> PolicyOptimizer.
        optimizer_settings: the settings class of that optimizer.
        num_workers: remote evaluators where the user names no number.
        idle_between_steps: between two steps no evaluator is sampling, so that a checkpoint can hold all of them and a
            resumed run goes on bit for bit.
    """

    name: str
    make_policy: Callable[..., Any]
    policy_settings: type
    defaults: Options
    tuned: Mapping[str, Options] = field(default_factory=dict)
    make_optimizer: Callable[[EvaluatorSet, Any, int], PolicyOptimizer] = SyncSamplesOptimizer
    optimizer_settings: type = SyncSamplesSettings
    num_workers: int = 0
    idle_between_steps: bool = True

    def options_for(self, env: Any) -> dict[str, Any]:
        """The options a run on this env starts from."""
        tuned = self.tuned.get(env, {}) if isinstance(env, str) else {}
        return {**self.defaults, **tuned}


def find_algorithm(name: str) -> Algorithm:
    """By name.

    Raises:
        ConfigError: unknown; the nearest name is given.
    """
    if name not in ALGORITHMS:
        raise unknown_name("algo", str(name), ALGORITHMS)
    return ALGORITHMS[name]


# Found by short searches, ten seeds and more each; gamma is that of RL Baselines3 Zoo.
_PPO_CARTPOLE = {
    "rollout_fragment_length": 128,
    "minibatch_size": 256,
    "num_sgd_iter": 10,
    "gamma": 0.98,
    "gae_lambda": 0.9,
    "learning_rate": 2e-3,
    "lr_schedule": "linear",
    "clip_range_schedule": "linear",
    "schedule_steps": 150_000,
}
_PPO_ACROBOT = {
    "rollout_fragment_length": 128,
    "minibatch_size": 256,
    "num_sgd_iter": 10,
    "learning_rate": 1e-3,
}
_PPO_PENDULUM = {
    "gamma": 0.9,
    "learning_rate": 1e-3,
}

# One update per sample of one evaluator; the step size falls to 0, or returns go up and down.
_ASYNC_CARTPOLE = {
    "rollout_fragment_length": 32,
    "train_batch_size": 256,
    "learner_queue_size": 2,
    "gamma": 0.98,
    "learning_rate": 2e-3,
    "lr_schedule": "linear",
    "schedule_steps": 400_000,
    "max_grad_norm": 0.5,
    "ent_coef": 0.0,
}
# CartPole's rewards are all 1; cut to 0.05, they keep values at 10 or less. On the way up to 50 the tanh units of the
# value net saturate, V becomes the same for all states, and returns collapse in the middle of some runs. What an action
# does to the cart's place shows a hundred steps later, hence gamma.
_IMPALA_CARTPOLE = {
    **_ASYNC_CARTPOLE,
    "gamma": 0.995,
    "clip_rewards": 0.05,
    "learning_rate": 1.5e-3,
    "schedule_steps": 600_000,
}

_REPLAY_COLUMNS = ("obs", "actions", "nstep_returns", "nstep_discounts")
_DQN_CARTPOLE = {
    "rollout_fragment_length": 32,
    "train_batch_size": 64,
    "updates_per_step": 64,
    "n_step": 3,
    "learning_rate": 1e-3,
    "max_grad_norm": 10.0,
    "target_update_interval": 128,
    "epsilon_steps": 8000,
    "final_epsilon": 0.04,
    "hidden": (128, 128),
    "activation": "relu",
}

# Sampling waits for the learner: 16 trained rows for each sampled one, in batches of 64, are an update for four rows.
_APEX_CARTPOLE = {
    "rollout_fragment_length": 4,
    "max_sample_requests_in_flight": 1,
    "num_replay_buffer_shards": 1,
    "per_worker_exploration": False,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "train_batch_size": 64,
    "training_intensity": 16.0,
    "learning_rate": 1e-3,
    "max_grad_norm": 10.0,
    "target_update_interval": 128,
    "epsilon_steps": 8000,
    "final_epsilon": 0.04,
    "hidden": (128, 128),
    "activation": "relu",
}

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(
        name="ppo",
        make_policy=PPOPolicy,
        policy_settings=PPOSettings,
        defaults={
            "rollout_fragment_length": 256,
            "minibatch_size": 64,
            "num_sgd_iter": 10,
            "standardize_fields": ("advantages",),
        },
        tuned={"CartPole-v1": _PPO_CARTPOLE, "Acrobot-v1": _PPO_ACROBOT, "Pendulum-v1": _PPO_PENDULUM},
    ),
    "a2c": Algorithm(
        name="a2c",
        make_policy=A2CPolicy,
        policy_settings=A2CSettings,
        defaults={"rollout_fragment_length": 5},
    ),
    "a3c": Algorithm(
        name="a3c",
        make_policy=A2CPolicy,
        policy_settings=A2CSettings,
        defaults={"rollout_fragment_length": 10},
        make_optimizer=lambda evaluators, settings, seed: AsyncGradientsOptimizer(evaluators, settings),
        optimizer_settings=AsyncGradientsSettings,
        num_workers=2,
    ),
    "impala": Algorithm(
        name="impala",
        make_policy=IMPALAPolicy,
        policy_settings=IMPALASettings,
        defaults={"rollout_fragment_length": 50},
        tuned={"CartPole-v1": _IMPALA_CARTPOLE},
        make_optimizer=AsyncSamplesOptimizer,
        optimizer_settings=AsyncSamplesSettings,
        num_workers=2,
        idle_between_steps=False,
    ),
    "appo": Algorithm(
        name="appo",
        make_policy=APPOPolicy,
        policy_settings=APPOSettings,
        defaults={"rollout_fragment_length": 50, "replay_buffer_num_slots": 100},
        tuned={"CartPole-v1": {**_ASYNC_CARTPOLE, "num_sgd_iter": 2}},
        make_optimizer=AsyncSamplesOptimizer,
        optimizer_settings=AsyncSamplesSettings,
        num_workers=2,
        idle_between_steps=False,
    ),
    "dqn": Algorithm(
        name="dqn",
        make_policy=DQNPolicy,
        policy_settings=DQNSettings,
        defaults={"rollout_fragment_length": 4, "buffer_size": 50_000, "replay_columns": _REPLAY_COLUMNS},
        tuned={"CartPole-v1": _DQN_CARTPOLE},
        make_optimizer=SyncReplayOptimizer,
        optimizer_settings=SyncReplaySettings,
    ),
    "apex": Algorithm(
        name="apex",
        make_policy=DQNPolicy,
        policy_settings=DQNSettings,
        defaults={
            "rollout_fragment_length": 50,
            "n_step": 3,
            "worker_side_prioritization": True,
            "per_worker_exploration": True,
            "num_replay_buffer_shards": 4,
            "buffer_size": 200_000,
            "learning_starts": 5000,
            "replay_columns": (*_REPLAY_COLUMNS, "policy_version"),
        },
        tuned={"CartPole-v1": _APEX_CARTPOLE},
        make_optimizer=AsyncReplayOptimizer,
        optimizer_settings=AsyncReplaySettings,
        num_workers=2,
        idle_between_steps=False,
    ),
}
