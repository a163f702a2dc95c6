"""Which layout steps an env fastest here: one env is measured, layouts are tried, the best is named with reasons."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import gymnasium
import numpy as np

from rlsample.bench.pool import drive, refuse_atari
from rlsample.env.async_vector_env import AsyncVectorEnv
from rlsample.env.convert import as_base_env
from rlsample.env.gym_envs import GymEnvs
from rlsample.env.pool.pool_settings import usable_cpus
from rlsample.errors import ConfigError

__all__ = ["EnvCosts", "TrialResult", "TuneReport", "format_report", "layouts_to_try", "measure_env", "tune"]

_SIMPLER_WINS = 0.9  # a simpler layout is taken if it has this share of the best one's speed
_WAITS = 0.5  # an env that uses less CPU than this share of its step's time waits for something
_UNEVEN = 0.5  # spread (standard deviation over mean) from which waiting for the slowest costs much


@dataclass(frozen=True)
class EnvCosts:
    """What one env costs, in this process.

    Attributes:
        step_us: median time of a step.
        step_p99_us: the 99th percentile.
        spread: how much the steps' times differ: (90th - 10th percentile) / (2.56 x median), which is the coefficient
            of variation of normally distributed times.
        cpu_share: CPU time of a step over its time, less the time other processes kept the core; small for an env
            that waits.
        reset_us: median time of a reset.
        build_ms: time to build it.
        steps, episodes: how many were measured.
    """

    step_us: float
    step_p99_us: float
    spread: float
    cpu_share: float
    reset_us: float
    build_ms: float
    steps: int
    episodes: int


@dataclass(frozen=True)
class TrialResult:
    """One layout, tried.

    Attributes:
        name: in words.
        config: options of :func:`~rlsample.env.as_base_env` that give it.
        steps_per_s, rows_per_poll: measured.
        memory_mb: private memory of the workers, all together; 0 inline.
    """

    name: str
    config: dict[str, Any]
    steps_per_s: float
    rows_per_poll: float
    memory_mb: float


@dataclass(frozen=True)
class TuneReport:
    """What :func:`tune` found.

    Attributes:
        costs: of one env.
        trials: fastest first.
        best: the trial to use: the fastest, or a simpler one that is nearly as fast.
        reason: why, in words with the numbers.
    """

    env: str
    num_envs: int
    costs: EnvCosts
    trials: list[TrialResult]
    best: TrialResult
    reason: str


def measure_env(env: Any, seconds: float = 1.0, env_config: Mapping[str, Any] | None = None) -> EnvCosts:
    """Builds one env and steps it with random actions for about so long, at least once."""
    started = perf_counter()
    base = as_base_env(env, 1, vectorize="loop", env_config=env_config or {}, seed=0)
    built = perf_counter() - started
    with base:
        one = base.sub_envs()[0]
        space = copy.deepcopy(one.action_space)
        space.seed(0)
        steps: list[float] = []
        resets: list[float] = []
        cpu, queued, until, ended = 0.0, _runqueue_s(), perf_counter() + seconds, True
        while not steps or perf_counter() < until:
            if ended:
                started = perf_counter()
                one.reset(seed=None if resets else 0)
                resets.append(perf_counter() - started)
            action = space.sample()
            busy, started = process_time(), perf_counter()
            _, _, terminated, truncated, _ = one.step(action)
            steps.append(perf_counter() - started)
            cpu += process_time() - busy
            ended = terminated or truncated
        queued = _runqueue_s() - queued
    low, middle, high, last = np.percentile(steps, [10, 50, 90, 99])
    return EnvCosts(
        step_us=float(middle * 1e6),
        step_p99_us=float(last * 1e6),
        spread=float((high - low) / (2.56 * middle)),
        cpu_share=min(1.0, cpu / max(1e-9, sum(steps) - queued)),
        reset_us=statistics.median(resets) * 1e6,
        build_ms=built * 1e3,
        steps=len(steps),
        episodes=len(resets) - 1,
    )


def layouts_to_try(
    costs: EnvCosts, num_envs: int, cores: int, has_vector_form: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Names and options, simplest first."""
    found: list[tuple[str, dict[str, Any]]] = [("one after the other, in this process", {"vectorize": "loop"})]
    if has_vector_form and num_envs > 1:
        found.append(("its own vector form, in this process", {"vectorize": "auto"}))

    def pool(name: str, **options: Any) -> None:
        config = {"backend": "process", "pool": options}
        if all(config != other for _, other in found):
            found.append((name, config))

    if num_envs == 1:
        return found[:1]
    workers = min(num_envs, cores)
    pool(f"{workers} workers, in order", num_workers=workers)
    pool(f"{workers} workers, half at a time", num_workers=workers, batch_size=max(1, num_envs // 2))
    if workers > 2:
        pool(f"{workers - 1} workers, in order", num_workers=workers - 1)
    if costs.cpu_share < _WAITS:
        many = min(num_envs, 8 * cores)
        pool(f"{many} workers, in order", num_workers=many)
        pool(f"{many} workers, first come", num_workers=many, batch_size=1)
    elif costs.spread > _UNEVEN:
        pool(f"{workers} workers, first come", num_workers=workers, batch_size=1)
    return found


def tune(env: Any, num_envs: int = 16, seconds: float = 2.0, env_config: Mapping[str, Any] | None = None) -> TuneReport:
    """Measures one env, then tries the layouts that could suit it, stepping only.

    Args:
        env: a Gymnasium id, a class or a factory.
        num_envs: slots.
        seconds: for the one env, and for each layout.
        env_config: as in :class:`~rlsample.env.EnvSettings`.

    Raises:
        ConfigError: an env that does not run in worker processes.
        EnvFailedError: an env failed.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")
    refuse_atari(env)
    costs = measure_env(env, seconds, env_config)
    trials = []
    spec = gymnasium.registry.get(env.rpartition(":")[2]) if isinstance(env, str) else None
    has_vector_form = spec is not None and spec.vector_entry_point is not None
    for name, config in layouts_to_try(costs, num_envs, len(usable_cpus()), has_vector_form):
        with as_base_env(env, num_envs, seed=0, env_config=env_config or {}, **config) as base:
            if config.get("vectorize") == "auto" and isinstance(base, GymEnvs):
                continue  # the vector form is another env, or pays for more slots only
            found = drive(base, seconds)
            memory = _private_mb(base.worker_pids) if isinstance(base, AsyncVectorEnv) else 0.0
        rows = found["steps"] / found["polls"]
        trials.append(TrialResult(name, config, found["steps_per_s"], rows, memory))
    fastest = max(trials, key=lambda trial: trial.steps_per_s)
    best = next(trial for trial in trials if trial.steps_per_s >= _SIMPLER_WINS * fastest.steps_per_s)
    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    reason = _reason(costs, trials, best, fastest)
    trials.sort(key=lambda trial: -trial.steps_per_s)
    return TuneReport(name, num_envs, costs, trials, best, reason)


def _reason(costs: EnvCosts, trials: list[TrialResult], best: TrialResult, fastest: TrialResult) -> str:
    inline = trials[0]
    step = f"a step takes {_time(costs.step_us)}"
    parts = []
    if "backend" not in best.config:
        own = 1e6 / inline.steps_per_s
        if best is inline:
            pools = [trial for trial in trials if "backend" in trial.config]
            parts.append(f"{step}; the loop over the envs costs {_time(own)} per step")
            if pools:
                rate = max(trial.steps_per_s for trial in pools)
                parts.append(f"worker processes reach {rate / inline.steps_per_s:.2f} times its speed here")
        else:
            parts.append(f"the env's own vector form is {best.steps_per_s / inline.steps_per_s:.1f} times the loop")
    else:
        gain = best.steps_per_s / inline.steps_per_s
        parts.append(f"{step}, and this layout is {gain:.1f} times the loop in this process")
        if costs.cpu_share < _WAITS:
            parts.append(f"only {costs.cpu_share:.0%} of that time needs a core, so more workers than cores pay")
        if best.config["pool"].get("batch_size"):
            parts.append(
                f"steps are uneven (spread {costs.spread:.2f} of the mean, one in a hundred takes "
                f"{_time(costs.step_p99_us)}), so waiting for the slowest would idle the others"
                if costs.spread > _UNEVEN
                else "one half is stepped while the other is handled"
            )
        else:
            parts.append(f"steps are even enough (spread {costs.spread:.2f} of the mean) to wait for all, in order")
    if best is not fastest:
        parts.append(f"{fastest.name!r} is only {fastest.steps_per_s / best.steps_per_s - 1:.0%} faster")
    return "; ".join(parts)


def format_report(report: TuneReport) -> str:
    """The report as text: the env, a table of the layouts, and the config to use with the reason."""
    costs = report.costs
    step = (
        f"a step takes {_time(costs.step_us)} (99 in 100 within {_time(costs.step_p99_us)}, spread {costs.spread:.2f}"
    )
    lines = [
        f"{report.env}: {step}, {costs.cpu_share:.0%} CPU), a reset {_time(costs.reset_us)}, "
        f"building it {costs.build_ms:.0f} ms",
        "",
        f"{'layout of ' + str(report.num_envs) + ' envs':<66} {'steps/s':>10} {'rows/poll':>10} {'MB':>7}",
    ]
    for trial in report.trials:
        mark = "*" if trial is report.best else " "
        memory = f"{trial.memory_mb:.0f}" if trial.memory_mb else "-"
        lines.append(f"{mark} {trial.name:<64} {trial.steps_per_s:>10,.0f} {trial.rows_per_poll:>10.1f} {memory:>7}")
    options = ", ".join(f"{name}={value!r}" for name, value in report.best.config.items())
    return "\n".join([*lines, "", f"use: num_envs={report.num_envs}, {options}", f"because {report.reason}"])


def _time(us: float) -> str:
    return f"{us:.1f} µs" if us < 100 else f"{us:.0f} µs" if us < 10_000 else f"{us / 1000:.0f} ms"


def _runqueue_s() -> float:
    """Seconds this thread has waited for a core so far (/proc/thread-self/schedstat); 0 where nobody says."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _private_mb(pids: list[int]) -> float:
    """Memory of these processes that nobody shares, in MB; 0 where /proc does not say."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("Private_"))
    return total / 1024
