"""The Atari benchmarks measure what they say."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from rlsample.bench.atari import bench_atari, bench_atari_acting
from rlsample.errors import ConfigError

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def script(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("batch_size", [None, 2, 1])
def test_stepping(batch_size):
    seconds, steps = 0.1, 0
    while steps < 60:  # on a busy machine not even one reset may fall into a fifth of a second
        seconds *= 2
        found = bench_atari("Pong-v5", 2, batch_size, seconds, max_episode_steps=5)
        steps = found["steps_per_s"] * found["seconds"]
    json.dumps(found)
    assert found["steps_per_s"] > 0
    assert found["frames_per_s"] == pytest.approx(4 * found["steps_per_s"])
    assert found["rows_per_recv"] <= (batch_size or 2)
    assert found["rows_per_recv"] < 2  # resets are no steps: one row in six, 5 / 6 of the batch remain
    assert found["recv_p50_ms"] <= found["recv_p99_ms"]
    assert found["cpu_us_per_step"] > 20
    assert (found["game"], found["num_envs"], found["batch_size"]) == ("pong", 2, batch_size or 2)
    assert found["seconds"] >= seconds


@pytest.mark.parametrize("groups", [1, 2])
def test_acting(groups):
    seen = []

    def act(obs):
        seen.append(len(obs))
        return np.ones(len(obs), np.int64)

    found = bench_atari_acting("pong", 2, groups, 0.2, act, max_episode_steps=5)
    assert set(seen) == {2 // groups}
    assert found["steps_per_s"] > 0
    assert 0 < found["act_share"] < 1
    if Path("/proc/self/task").is_dir():
        assert 0 < found["emulators_busy"] <= 1.2
    assert found["groups"] == groups


def test_an_idle_emulator_is_seen():
    """A policy that sleeps nine tenths of the time leaves one group idle as long."""
    import time

    found = bench_atari_acting("pong", 1, 1, 0.3, lambda obs: (time.sleep(0.05), np.ones(len(obs), np.int64))[1])
    assert found["act_share"] > 0.6
    if found["emulators_busy"] is not None:
        assert found["emulators_busy"] < 0.5


def test_no_time():
    with pytest.raises(ConfigError, match="seconds must be positive, not 0"):
        bench_atari(seconds=0)


def test_the_comparison_script_takes_medians_of_ratios(monkeypatch, capsys):
    atari = script("atari")
    rates = {"rlsample": iter([10.0, 30.0, 20.0]), "EnvPool": iter([10.0, 20.0, 40.0])}
    monkeypatch.setattr(atari, "ours", lambda *a: next(rates["rlsample"]))
    monkeypatch.setattr(atari, "rival", lambda *a: next(rates["EnvPool"]))
    arguments = ["--envpool-python", "python", "--no-gymnasium", "--rounds", "3", "--cases", "8/8", "--json"]
    monkeypatch.setattr(sys, "argv", ["atari.py", *arguments])
    atari.main()
    (case,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert case["medians"] == {"rlsample": 20.0, "EnvPool": 20.0}
    assert case["ratios"] == {"EnvPool": 1.0}  # of 1, 1.5 and 0.5


@pytest.mark.skipif(os.environ.get("CI") == "1" or not hasattr(os, "sched_getaffinity"), reason="a second or two")
def test_the_gymnasium_rival_runs():
    pytest.importorskip("cv2", reason="AtariPreprocessing needs opencv-python")
    atari = script("atari")
    assert atari.rival(sys.executable, atari.GYMNASIUM, "Pong", 1, 1, 0.2) > 0


@pytest.mark.skipif(not os.environ.get("ENVPOOL_PYTHON"), reason="ENVPOOL_PYTHON names no Python that has envpool")
def test_the_envpool_rival_runs():
    atari = script("atari")
    assert atari.rival(os.environ["ENVPOOL_PYTHON"], atari.ENVPOOL, "Pong-v5", 2, 1, 0.2) > 0
