"""IMPALA and APPO learn CartPole with two sampling processes: minutes long, `make test-slow`.

The same as `rlsample train --algo impala --env CartPole-v1 --num-workers 2 --stop-return 475 --max-steps 400000`.
"""

import pytest

from rlsample.algorithms import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("algo", "options"),
    [("impala", {}), ("appo", {}), ("impala", {"num_data_loader_buffers": 2})],
    ids=["impala", "appo", "impala-loaders"],
)
def test_two_workers_reach_475(algo, options, seed):
    result = train(
        algo=algo, env="CartPole-v1", num_workers=2, seed=seed, stop_return=475, max_steps=400_000, **options
    )
    print(f"{algo} {options} seed {seed}: {result.return_mean:.0f} after {result.env_steps:,}, {result.seconds:.0f} s")
    assert result.stopped_by == "stop_return", result
