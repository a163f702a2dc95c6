"""The replay benchmark measures what it says."""

import json

import pytest
from click.testing import CliRunner

from rlsample.bench.replay import _main, bench_replay
from rlsample.errors import ConfigError


@pytest.mark.parametrize("prioritized", [True, False])
def test_it_counts_rows(prioritized):
    found = bench_replay(capacity=100, num_rows=10, batch_size=20, obs_size=3, prioritized=prioritized, seconds=0.03)
    assert found["added_rows_per_s"] > 0
    assert found["sampled_rows_per_s"] > 0
    assert (found["updated_rows_per_s"] is not None) == prioritized
    # obs 12, action 8, two numbers 8, next observation 8 and a share of the extra ones
    assert 36 <= found["bytes_per_row"] < 60


def test_the_command_prints_json():
    words = ["--seconds", "0.01", "--capacity", "64", "--batch-size", "8", "--json"]
    done = CliRunner().invoke(_main, words)
    assert json.loads(done.output)["batch_size"] == 8


def test_refusals():
    with pytest.raises(ConfigError, match="batch_size"):
        bench_replay(batch_size=0)
    with pytest.raises(ConfigError, match="seconds"):
        bench_replay(seconds=0)
