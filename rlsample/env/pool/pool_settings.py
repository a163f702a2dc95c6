"""How the worker pool runs: processes, order, places, time limits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsample.errors import ConfigError, unknown_name
from rlsample.settings import from_options, option

__all__ = ["PoolSettings", "usable_cpus"]

_START_METHODS = ("forkserver", "spawn", "fork")


@dataclass(frozen=True)
class PoolSettings:
    """Options of :class:`~rlsample.env.async_vector_env.AsyncVectorEnv`, and of ``backend="process"``.

    Raises:
        ConfigError: a value that cannot work.
    """

    num_workers: int | None = option(None, "worker processes; none: one per usable core, at most num_envs")
    batch_size: int | None = option(None, "rows a poll waits for; none: every row that is owed if ordered, else one")
    ordered: bool | None = option(
        None, "poll brings all slots that are owed a row, in order; none: yes, unless batch_size is below num_envs"
    )
    groups: int = option(
        1, "ordered: slots in so many groups, polled in turn, so that one steps while another is acted on"
    )
    reset_ahead: bool = option(True, "reset an env as soon as its episode ended, before it is asked for")
    info_keys: tuple[str, ...] = option(
        (), "numbers of these names are the infos, sent as columns; none: whole infos, pickled"
    )
    start_method: str = option("forkserver", "forkserver, spawn, or fork (refused where threads make it unsafe)")
    thread_affinity_offset: int | None = option(
        None,
        "pin worker i to usable core (offset + i) mod cores; -1: do not pin; none: 0 for a worker per core, or -1",
    )
    numa: str = option("off", "off; spread: workers over the NUMA nodes in turn; a number: all on that node")
    threads_per_worker: int = option(1, "OMP, MKL and OpenBLAS threads of each worker")
    spin_us: float | None = option(
        None, "microseconds to spin before sleeping; none: 50 with more cores than workers, else 0"
    )
    step_timeout_s: float | None = option(
        300.0, "seconds one call into an env may take before its worker is killed and counts as failed; none: for ever"
    )
    close_timeout_s: float = option(2.0, "seconds workers have to close their envs before they are killed")

    def __post_init__(self) -> None:
        if self.start_method not in _START_METHODS:
            raise unknown_name("start_method", str(self.start_method), _START_METHODS)
        for name in ("num_workers", "batch_size"):
            _require_count(name, getattr(self, name), optional=True)
        for name in ("groups", "threads_per_worker"):
            _require_count(name, getattr(self, name), optional=False)
        if self.spin_us is not None and not self.spin_us >= 0:
            raise ConfigError(f"spin_us must be >= 0 or None, got {self.spin_us!r}")
        if self.step_timeout_s is not None and not self.step_timeout_s > 0:
            raise ConfigError(f"step_timeout_s must be > 0 or None, got {self.step_timeout_s!r}")
        if not self.close_timeout_s > 0:
            raise ConfigError(f"close_timeout_s must be > 0, got {self.close_timeout_s!r}")
        if isinstance(self.info_keys, str) or not all(isinstance(key, str) for key in self.info_keys):
            raise ConfigError(f"info_keys must be names, got {self.info_keys!r}")
        offset = self.thread_affinity_offset
        if offset is not None and (not isinstance(offset, int) or offset < -1):
            raise ConfigError(f"thread_affinity_offset must be an int >= -1 or None, got {offset!r}")
        numa = str(self.numa)
        if numa not in ("off", "spread") and not numa.isdecimal():
            raise ConfigError(f"numa must be 'off', 'spread' or a node's number, got {self.numa!r}")

    @classmethod
    def of(cls, settings: PoolSettings | Mapping[str, Any]) -> PoolSettings:
        """Settings as they are, or made of a mapping; an unknown name names the nearest known one."""
        return settings if isinstance(settings, PoolSettings) else from_options(cls, settings)

    def workers_for(self, num_envs: int) -> int:
        """Worker processes for so many slots."""
        return min(num_envs, self.num_workers or len(usable_cpus()))

    def is_ordered(self, num_envs: int) -> bool:
        """Whether polls are ordered.

        Raises:
            ConfigError: ``batch_size`` and ``ordered`` or ``groups`` do not go together.
        """
        size = self.batch_size or num_envs
        if size > num_envs:
            raise ConfigError(f"batch_size={size} is more than num_envs={num_envs}: a poll could never fill it")
        ordered = size == num_envs if self.ordered is None else self.ordered
        if ordered and size < num_envs:
            raise ConfigError(
                f"ordered=True waits for all {num_envs} envs, so batch_size={size} cannot be; leave one out"
            )
        if self.groups > 1 and not ordered:
            raise ConfigError("groups are polled in order; first come, first served needs ordered=False and groups=1")
        if self.groups > num_envs:
            raise ConfigError(f"groups={self.groups} is more than num_envs={num_envs}")
        return ordered

    def spin_for(self, num_envs: int) -> float:
        """Microseconds to spin: nothing where spinning would take the core of a worker."""
        if self.spin_us is not None:
            return float(self.spin_us)
        return 50.0 if len(usable_cpus()) > self.workers_for(num_envs) else 0.0


def usable_cpus() -> list[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _require_count(name: str, value: Any, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an int >= 1{' or None' if optional else ''}, got {value!r}")
