"""IMPALA and APPO learn CartPole with two sampling processes: minutes long, `make test-slow`.

The same as `rlsample train --algo impala --env CartPole-v1 --num-workers 2 --stop-return 475 --max-steps 600000`.
"""

import pytest

from rlsample.algorithms import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("algo", "max_steps", "options"),
    [("impala", 600_000, {}), ("appo", 400_000, {}), ("impala", 600_000, {"num_data_loader_buffers": 2})],
    ids=["impala", "appo", "impala-loaders"],
)
def test_two_workers_reach_475(algo, max_steps, options, seed):
    result = train(
        algo=algo, env="CartPole-v1", num_workers=2, seed=seed, stop_return=475, max_steps=max_steps, **options
    )
    print(f"{algo} {options} seed {seed}: {result.return_mean:.0f} after {result.env_steps:,}, {result.seconds:.0f} s")
    assert result.stopped_by == "stop_return", result
