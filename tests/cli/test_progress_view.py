"""Progress: what a line and a panel say, and how often lines come."""

import io

import pytest
from rich.console import Console

from rlsample.cli import progress_view
from rlsample.cli.progress_view import LineView, LiveView, make_view, panel, progress_line

RESULT = {
    "time/total_timesteps": 12_345,
    "time/fps": 9876.4,
    "time/time_elapsed": 1.25,
    "rollout/ep_rew_mean": 23.456,
    "rollout/ep_len_mean": 24.0,
    "rollout/episodes": 1024,
    "time/env_share": 0.5,
    "time/infer_share": 0.25,
    "time/process_share": 0.05,
    "time/learn_share": 0.2,
}


def test_line():
    assert progress_line(RESULT) == (
        "steps 12,345  fps 9,876  return 23.5  length 24.0  episodes 1,024  env 50% infer 25% process 5% learn 20%"
    )


def test_with_workers_the_shares_are_named_as_theirs():
    result = {tag: value for tag, value in RESULT.items() if tag != "time/learn_share"} | {"time/other_share": 0.2}
    shown = "workers: env 50% infer 25% process 5% other 20%"
    assert progress_line(result).endswith(f"  episodes 1,024  {shown}")
    console = Console(file=io.StringIO(), width=90)
    console.print(panel("impala on CartPole-v1", result, 50_000))
    assert f"time: {shown}" in console.file.getvalue()


def test_line_without_data():
    result = {**RESULT, "rollout/ep_rew_mean": None, "rollout/ep_len_mean": None, "rollout/episodes": 0}
    result = {tag: value for tag, value in result.items() if not tag.endswith("_share")}
    assert progress_line(result) == "steps 12,345  fps 9,876  return no data  length no data  episodes 0"


def test_panel_shows_steps_return_and_shares():
    console = Console(file=io.StringIO(), width=90)
    console.print(panel("ppo on CartPole-v1", RESULT, 50_000))
    text = console.file.getvalue()
    for part in ("ppo on CartPole-v1", "12,345 / 50,000 steps", "23.5", "1,024", "9,876", "1 s", "learn 20%"):
        assert part in text


LEARNER = {
    "optimizer/policy_lag_mean": 2.13,
    "optimizer/learner_queue_size_mean": 0.44,
    "optimizer/learner_wait_share": 0.12,
}


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, "lag 2.1 queue 0.4 learner waits 12%"),
        ({"optimizer/num_dropped_rows": 1500}, "lag 2.1 queue 0.4 learner waits 12% dropped 1,500 rows"),
    ],
)
def test_a_learner_thread_tells_lag_queue_waits_and_drops(more, shown):
    assert progress_line({**RESULT, **LEARNER, **more}) == f"{progress_line(RESULT)}  {shown}"
    console = Console(file=io.StringIO(), width=90)
    console.print(panel("impala on CartPole-v1", {**RESULT, **LEARNER, **more}, 50_000))
    assert shown in console.file.getvalue()


@pytest.mark.parametrize(
    ("interval", "shown"),
    [(0.0, ["steps 1 ", "steps 2 ", "steps 3 ", "steps 4 "]), (10.0, ["steps 1 ", "steps 3 ", "steps 4 "])],
)
def test_lines_come_by_interval_and_the_last_one_always(monkeypatch, capsys, interval, shown):
    clock = iter([100.0, 105.0, 111.0, 112.0])
    monkeypatch.setattr(progress_view, "monotonic", lambda: next(clock))
    view = LineView(interval)
    for step in (1, 2, 3, 4):
        view.show({**RESULT, "time/total_timesteps": step})
    view.close()
    view.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == len(shown)
    assert all(line.startswith(start) for line, start in zip(lines, shown, strict=True))


def test_no_terminal_gives_lines():
    assert isinstance(make_view("t", 10, 1.0), LineView)


def test_live_view_draws_the_last_result(monkeypatch, capsys):
    clock = iter([100.0, 100.01])
    monkeypatch.setattr(progress_view, "monotonic", lambda: next(clock))
    view = LiveView("title", 50_000)
    view.show({**RESULT, "time/total_timesteps": 111})
    view.show({**RESULT, "time/total_timesteps": 222})
    view.close()
    view.close()
    captured = capsys.readouterr()
    assert "222 / 50,000 steps" in captured.err
    assert captured.out == ""
