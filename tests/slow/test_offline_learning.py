"""Learning from logs alone, without one step of the env."""

from __future__ import annotations

import gymnasium
import pytest

import rlsample
from rlsample.algorithms import evaluate
from rlsample.algorithms.presets import find_algorithm
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.offline import LogReader
from rlsample.policy import RandomPolicy

pytestmark = pytest.mark.slow


class Untouched(gymnasium.Env):
    """CartPole's spaces, and nobody may step it."""

    observation_space = gymnasium.make("CartPole-v1").observation_space
    action_space = gymnasium.spaces.Discrete(2)


@pytest.mark.parametrize("seed", [0, 1])
def test_dqn_learns_cartpole_from_what_ppo_recorded(tmp_path, seed):
    """PPO records its way from nothing to above 300; DQN, from these rows alone, plays at least 100 (random: 22).
    docs/offline.md has the returns of three seeds."""
    logs = tmp_path / "logs"
    rlsample.train(algo="ppo", env="CartPole-v1", seed=seed, max_steps=40_000, output=str(logs))
    with LogReader(logs) as reader:
        assert sum(batch.count for batch in reader) >= 40_000
    options = find_algorithm("dqn").options_for("CartPole-v1")
    result = rlsample.train(
        {**options, "algo": "dqn", "env": Untouched, "seed": seed},
        **{"input": str(logs), "input_shuffle_window": 8, "max_steps": 100_000, "out": str(tmp_path / "run")},
    )
    assert result.episodes == 0
    played = evaluate(tmp_path / "run", episodes=20, env="CartPole-v1")
    with CommonPolicyEvaluator("CartPole-v1", RandomPolicy, seed=1, rollout_fragment_length=2000) as evaluator:
        evaluator.sample()
        returns = [episode.episode_return for episode in evaluator.get_metrics()]
    assert sum(returns) / len(returns) < 30
    assert played.returns.mean() >= 100
