"""DQN learns CartPole: a mean return of 400 over 100 episodes on three seeds. Minutes long: `make test-slow`."""

import pytest

from rlsample.algorithms import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dqn_learns_cartpole(seed):
    result = train(algo="dqn", env="CartPole-v1", seed=seed, stop_return=400.0, max_steps=150_000)
    print(f"seed {seed}: {result.return_mean:.0f} after {result.env_steps:,} steps, {result.seconds:.1f} s")
    assert result.stopped_by == "stop_return", result
