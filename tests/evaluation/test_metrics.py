"""Metrics: NaN and not 0 before the first episode, windows of bounded size, timers that start over."""

from __future__ import annotations

import json
import math

import pytest

from rlsample.errors import ConfigError
from rlsample.evaluation.metrics import EpisodeMetrics, MetricsWindow, Timers


def episode(i: int, **custom: float) -> EpisodeMetrics:
    return EpisodeMetrics(
        episode_return=10.0 * i, length=i + 1, env_id=i % 2, eps_id=100 + i, worker_index=3, custom=custom
    )


def test_before_any_episode_there_is_no_score() -> None:
    summary = MetricsWindow().summary()
    assert (summary.pop("rollout/episodes"), summary.pop("rollout/episodes_this_iter")) == (0, 0)
    assert sorted(summary) == [f"rollout/ep_{x}" for x in ("len_mean", "rew_max", "rew_mean", "rew_min")]
    assert all(math.isnan(value) for value in summary.values())


def test_the_window_forgets_and_the_counts_do_not() -> None:
    window = MetricsWindow(size=3)
    window.add([episode(1), episode(2)])
    window.add([])
    window.add([episode(7), episode(3)])
    assert window.summary() == {
        "rollout/ep_rew_mean": 40.0,
        "rollout/ep_rew_max": 70.0,
        "rollout/ep_rew_min": 20.0,
        "rollout/ep_len_mean": 5.0,
        "rollout/episodes": 4,
        "rollout/episodes_this_iter": 4,
    }
    window.add([episode(2)])
    summary = window.summary()
    assert (summary["rollout/episodes"], summary["rollout/episodes_this_iter"]) == (5, 1)
    assert window.summary()["rollout/episodes_this_iter"] == 0
    assert window.summary()["rollout/ep_rew_mean"] == 40.0
    with pytest.raises(ConfigError, match="0 episodes"):
        MetricsWindow(0)


def test_the_default_window_is_100_episodes() -> None:
    window = MetricsWindow()
    window.add([episode(i) for i in range(101)])
    assert window.summary()["rollout/ep_rew_min"] == 10.0


def test_custom_metrics_average_over_the_episodes_that_have_them() -> None:
    window = MetricsWindow(size=3)
    window.add([episode(1, only=9.0), episode(2, a=1.0, b=math.nan), episode(3, a=4.0), episode(4, b=8.0, c=math.nan)])
    summary = window.summary()
    assert {k: v for k, v in summary.items() if "custom" in k} == {
        "rollout/custom/a_mean": 2.5,
        "rollout/custom/b_mean": 8.0,
    }


def test_state_is_plain_and_continues() -> None:
    window = MetricsWindow(size=2)
    window.add([episode(1, a=5.0), episode(2), episode(3, a=7.0)])
    state = json.loads(json.dumps(window.get_state()))
    again, smaller = MetricsWindow(size=2), MetricsWindow(size=1)
    again.add([episode(50)])
    again.set_state(state)
    smaller.set_state(state)
    assert again.get_state() == window.get_state()
    assert again.summary() == window.summary()
    assert smaller.summary()["rollout/ep_rew_mean"] == 30.0
    assert state["episodes"][1] == {
        "episode_return": 30.0,
        "length": 4,
        "env_id": 1,
        "eps_id": 103,
        "worker_index": 3,
        "custom": {"a": 7.0},
        "agent_returns": {},
    }


def test_timers_give_means_per_poll_and_start_over() -> None:
    now = [10.0]
    timers = Timers(lambda: now[0])
    timers.env_s += 0.5
    timers.inference_s += 0.25
    timers.processing_s += 0.125
    timers.polls += 4
    now[0] = 12.0
    assert timers.drain() == {
        "sampler/env_ms": 125.0,
        "sampler/infer_ms": 62.5,
        "sampler/processing_ms": 31.25,
        "sampler/elapsed_ms": 500.0,
        "sampler/polls": 4,
    }
    empty = timers.drain()
    assert empty.pop("sampler/polls") == 0
    assert all(math.isnan(value) for value in empty.values())
    timers.env_s += 0.001
    timers.polls += 1
    now[0] = 12.25
    assert timers.drain().items() >= {"sampler/env_ms": 1.0, "sampler/elapsed_ms": 250.0}.items()
