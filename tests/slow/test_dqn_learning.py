"""DQN and Ape-X learn CartPole: a mean return of 450 on three seeds. Minutes long: `make test-slow`."""

import pytest

from rlsample.algorithms import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("algo", "num_workers", "max_steps"), [("dqn", 0, 150_000), ("apex", 2, 200_000)])
def test_q_learning_learns_cartpole(algo, num_workers, max_steps, seed):
    result = train(
        algo=algo, env="CartPole-v1", num_workers=num_workers, seed=seed, stop_return=450, max_steps=max_steps
    )
    print(f"{algo} seed {seed}: {result.return_mean:.0f} after {result.env_steps:,} steps, {result.seconds:.1f} s")
    assert result.stopped_by == "stop_return", result
