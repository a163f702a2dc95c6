"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any, Protocol

import click

__all__ = ["LineView", "LiveView", "ProgressView", "make_view", "panel", "progress_line"]

_REDRAWS_PER_S = 8.0
_SHARES = ("env", "infer", "process", "learn", "other")


class ProgressView(Protocol):
    """Shows results as they come."""

    def show(self, result: Mapping[str, Any]) -> None:
        """Takes one result; it need not be drawn at once."""

    def close(self) -> None:
        """Draws the last result. Idempotent."""


def make_view(title: str, max_steps: int, log_interval_s: float) -> ProgressView:
    """A live panel if stdout and stderr are terminals, else lines on stderr. stdout is left to the results."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        return LiveView(title, max_steps)
    return LineView(log_interval_s)


class LineView:
    """One line on stderr per interval, and one for the last result."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next = 0.0
        self._pending: Mapping[str, Any] | None = None

    def show(self, result: Mapping[str, Any]) -> None:
        self._pending = result
        now = monotonic()
        if now >= self._next:
            self._next = now + self._interval_s
            self._print()

    def close(self) -> None:
        self._print()

    def _print(self) -> None:
        if self._pending is not None:
            click.echo(progress_line(self._pending), err=True)
            self._pending = None


class LiveView:
    """A panel with a bar of steps, redrawn in place, by the calling thread only."""

    def __init__(self, title: str, max_steps: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._max_steps = max_steps
        self._last: Mapping[str, Any] | None = None
        self._next = 0.0
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=False)
        self._live.start()

    def show(self, result: Mapping[str, Any]) -> None:
        self._last = result
        now = monotonic()
        if now >= self._next:
            self._next = now + 1 / _REDRAWS_PER_S
            self._draw()

    def close(self) -> None:
        if self._live.is_started:
            self._draw()
            self._live.stop()

    def _draw(self) -> None:
        if self._last is not None:
            self._live.update(panel(self._title, self._last, self._max_steps), refresh=True)


def progress_line(result: Mapping[str, Any]) -> str:
    """One result in one line, such as ``steps 2,560  fps 11,200  return 23.4 ...``."""
    parts = [
        f"steps {result['time/total_timesteps']:,}",
        f"fps {result['time/fps']:,.0f}",
        f"return {_number(result['rollout/ep_rew_mean'])}",
        f"length {_number(result['rollout/ep_len_mean'])}",
        f"episodes {result['rollout/episodes']:,}",
    ]
    shares = _shares(result)
    if shares:
        parts.append(shares)
    learner = _learner(result)
    return "  ".join([*parts, learner] if learner else parts)


def panel(title: str, result: Mapping[str, Any], max_steps: int) -> Any:
    """The live panel for one result, as a rich renderable."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    steps = result["time/total_timesteps"]
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1)
    head.add_column(justify="right")
    head.add_row(ProgressBar(total=max_steps, completed=min(steps, max_steps)), f"{steps:,} / {max_steps:,} steps")
    facts = Table.grid(padding=(0, 3))
    facts.add_row("return", "length", "episodes", "steps/s", "time", style="dim")
    facts.add_row(
        Text(_number(result["rollout/ep_rew_mean"]), style="bold green"),
        _number(result["rollout/ep_len_mean"]),
        f"{result['rollout/episodes']:,}",
        f"{result['time/fps']:,.0f}",
        f"{result['time/time_elapsed']:.0f} s",
    )
    lines = [head, facts]
    shares = _shares(result)
    if shares:
        lines.append(Text(f"time: {shares}", style="dim"))  # type: ignore[arg-type]
    learner = _learner(result)
    if learner:
        lines.append(Text(learner, style="dim"))  # type: ignore[arg-type]
    return Panel(Group(*lines), title=title, title_align="left", border_style="blue")


def _shares(result: Mapping[str, Any]) -> str:
    """Where the time went, such as ``env 50% infer 25% process 5% learn 20%``; with workers their own time, averaged
    over them: ``workers: env 50% ... other 20%``."""
    pairs = [(name, result.get(f"time/{name}_share")) for name in _SHARES]
    words = " ".join(f"{name} {share:.0%}" for name, share in pairs if share is not None)
    return f"workers: {words}" if result.get("time/other_share") is not None else words


def _learner(result: Mapping[str, Any]) -> str:
    """What an optimizer with a learner thread tells of it, such as ``lag 2.1 queue 0.4 learner waits 12%``."""
    lag = result.get("optimizer/policy_lag_mean")
    if lag is None:
        return ""
    words = f"lag {lag:.1f} queue {result['optimizer/learner_queue_size_mean']:.1f}"
    words += f" learner waits {result['optimizer/learner_wait_share']:.0%}"
    dropped = result.get("optimizer/num_dropped_rows", 0)
    return words + (f" dropped {dropped:,} rows" if dropped else "")


def _number(value: float | None) -> str:
    return "no data" if value is None else f"{value:,.1f}"
