"""The HTTP measurement: whole calls from another process, with their rows, and nothing left running."""

import contextlib
import http.client
import json
import time

import pytest
from click.testing import CliRunner

from rlsample.bench import serving_http
from rlsample.bench.serving import bench_serving
from rlsample.cli import main
from rlsample.errors import ConfigError, ServingError


def test_it_counts_calls():
    options = ["--http", "--clients", "2", "--seconds", "0.5", "--json"]
    found = CliRunner().invoke(main, ["bench", "serving", *options])
    assert found.exit_code == 0, found.output
    figures = json.loads(found.output.splitlines()[-1])
    assert set(figures) == {"actions_per_s", "p50_ms", "p99_ms", "rows"}
    assert figures["actions_per_s"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]


def test_rows_of_batched_calls_arrive_in_the_servers_process_which_says_when_it_is_gone():
    lanes, episodes = 16, 2
    clock = serving_http._Clock([[]], measuring=True)
    with serving_http._server(lanes) as (port, ask):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            for _ in range(episodes):
                serving_http._play_batches(connection, lanes, clock, clock.waits[0])
        assert len(clock.waits[0]) == episodes * 200
        batches = episodes * 200 * lanes // 2048  # the server counts rows by the batch
        deadline = time.monotonic() + 60
        while ask("rows") < batches * 2048:
            assert time.monotonic() < deadline
        assert ask("rows") <= episodes * 200 * lanes
        assert ask("dropped") == 0
        with pytest.raises(ServingError, match="ended"):
            ask("nonsense")


def test_what_it_cannot_measure():
    with pytest.raises(ConfigError, match="clients and batch"):
        bench_serving(0, 0.1, http=True)
    with pytest.raises(ConfigError, match="only over HTTP"):
        bench_serving(1, 0.1, batch=2)
