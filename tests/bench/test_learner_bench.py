"""The learner's benchmarks run and measure what they say."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from rlsample.bench.learner import bench_learner
from rlsample.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_learner_does_not_wait_for_a_fast_sampler():
    result = bench_learner(1.0, "vector", train_batch_size=500)
    assert result["rows_per_s"] == pytest.approx(500 * result["updates_per_s"])
    assert result["updates_per_s"] > 1
    assert result["wait_share"] < 0.05
    assert result["bytes_copied_per_row"] == 0  # no loaders


def test_loaders_copy_each_row_once_on_the_cpu():
    result = bench_learner(0.3, "image", train_batch_size=50, num_data_loader_buffers=2)
    assert 1 <= result["copies_per_row"] < 1.05
    assert result["fill_s"] > 0


def test_an_unknown_observation_is_named():
    with pytest.raises(ConfigError, match="'image'"):
        bench_learner(0.1, "imag")


def test_the_gpu_script_runs_anywhere(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_loader.py", "--quick", "--json", "--device", "cpu"])
    runpy.run_path(str(ROOT / "benchmarks" / "gpu_loader.py"), run_name="__main__")
    result = json.loads(capsys.readouterr().out)
    assert [one["slots"] for one in result["learner"]] == [0, 1, 2, 3]
    assert all(one["rows_per_s"] > 0 for one in result["learner"])
    assert result["fill_gb_per_s"] > 0
