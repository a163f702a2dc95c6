"""The benchmark measures something, and says so when it did not."""

import pytest

from rlsample.bench.serving import bench_serving
from rlsample.errors import ConfigError


@pytest.mark.parametrize("clients", [1, 3])
def test_it_counts_answers_and_rows(clients):
    result = bench_serving(clients, 0.2)
    assert set(result) == {"actions_per_s", "p50_ms", "p99_ms", "rows"}
    assert result["actions_per_s"] > 100
    assert 0 < result["p50_ms"] <= result["p99_ms"] < 1000
    assert result["rows"] > 0


def test_what_it_cannot_measure():
    with pytest.raises(ConfigError, match="at least 1"):
        bench_serving(0, 0.1)
