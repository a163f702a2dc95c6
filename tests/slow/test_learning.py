"""Presets learn: each reaches its return on three seeds, within its steps. Minutes long: `make test-slow`.

`pytest -m slow -rP tests/slow/test_learning.py` prints steps and seconds of each.
"""

import pytest

from rlsample.algorithms import train

pytestmark = pytest.mark.slow

GOALS = {
    # algo, env: (mean return of the last 100 episodes, env steps it may take)
    ("ppo", "CartPole-v1"): (475.0, 70_000),
    ("ppo", "Acrobot-v1"): (-100.0, 300_000),
    ("ppo", "Pendulum-v1"): (-250.0, 300_000),
    ("a2c", "CartPole-v1"): (475.0, 300_000),
    ("a3c", "CartPole-v1"): (475.0, 400_000),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("algo", "env"), GOALS)
def test_preset_learns(algo, env, seed):
    goal, max_steps = GOALS[algo, env]
    result = train(algo=algo, env=env, seed=seed, stop_return=goal, max_steps=max_steps)
    print(
        f"{algo} {env} seed {seed}: {result.return_mean:.0f} after {result.env_steps:,} steps, {result.seconds:.1f} s"
    )
    assert result.stopped_by == "stop_return", result
