"""A worker's sub-envs as objects: built, marked while their code runs, asked for attributes, closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlsample.env.base_env import EnvContext
from rlsample.env.gym_wrappers import peel
from rlsample.env.pool.env_plan import EnvPlan, require_gym_env, require_same_spaces
from rlsample.env.pool.shared_block import PROGRESS, ROW
from rlsample.env.quick_contains import quicken
from rlsample.env.slot_failures import raised
from rlsample.errors import EnvFailedError

__all__ = ["SlotEnvs"]


class SlotEnvs:
    """The envs of slots ``first <= slot < first + count``; row r is slot ``first + r``.

    Attributes:
        envs: per row; None: there is none, as it failed and was not built again.
        steps: per row, its step beneath the standard wrappers.
        limits: int64[count], its time limit.
        incarnation: per row.
        begun: calls into envs so far.
    """

    def __init__(self, plan: EnvPlan, slots: range, line: memoryview) -> None:
        self.plan, self.first, self.count = plan, slots.start, len(slots)
        self.envs: list[Any] = [None] * self.count
        self.steps: list[Any] = [None] * self.count
        self.limits = np.zeros(self.count, np.int64)
        self.incarnation = list(plan.incarnations[slots.start : slots.stop]) or [0] * self.count
        self.begun = 0
        self._line = line

    def mark(self, row: int) -> None:
        """Says in shared memory that this row's code runs now, and has just begun."""
        self.begun += 1
        self._line[ROW], self._line[PROGRESS] = self.first + row, self.begun

    def unmark(self) -> None:
        """Says that no env's code runs."""
        self._line[ROW] = -1

    @contextlib.contextmanager
    def calling(self, row: int) -> Iterator[None]:
        """Marks the row for the time of the block. SystemExit leaves the mark: the pool says in which env it was."""
        self.mark(row)
        try:
            yield
        except Exception:
            self.unmark()
            raise
        self.unmark()

    def build_all(self) -> tuple[Any, Any]:
        """Builds every env; returns their observation and action space.

        Raises:
            EnvFailedError: a constructor raised.
            SpaceError: slots differ in their spaces.
        """
        for row in range(self.count):
            self._build(row)
        spaces = self.envs[0].observation_space, self.envs[0].action_space
        for row, env in enumerate(self.envs):
            require_same_spaces(env, self.first + row, spaces, self.first)
        return spaces

    def rebuild(self, row: int, incarnation: int, spaces: tuple[Any, Any]) -> None:
        """Replaces the env of a row. Raises as :meth:`build_all`."""
        env, self.envs[row] = self.envs[row], None
        self.incarnation[row] = incarnation
        if env is not None:
            with contextlib.suppress(Exception), self.calling(row):  # it is broken; what matters is the new one
                env.close()
        self._build(row)
        require_same_spaces(self.envs[row], self.first + row, spaces, None)
        quicken(self.envs[row])

    def _build(self, row: int) -> None:
        plan, slot = self.plan, self.first + row
        context = EnvContext(plan.worker_index, slot, plan.num_envs, self.incarnation[row], plan.env_config)
        try:
            with self.calling(row):
                env = plan.make(context)
        except EnvFailedError:
            raise
        except Exception as e:
            raise raised(slot, e, "__init__") from e
        require_gym_env(env, slot)
        self.envs[row] = env
        self.steps[row], self.limits[row] = peel(env)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """``env.get_wrapper_attr(name)`` of each env; called with the arguments if it can be called."""
        found = []
        for row in range(self.count):
            with self._env(row) as env:
                value = env.get_wrapper_attr(name)
                found.append(value(*args, **kwargs) if callable(value) else value)
        return found

    def set_attr(self, name: str, values: list[Any]) -> None:
        """``env.set_wrapper_attr(name, value)`` of each env."""
        for row, value in enumerate(values):
            with self._env(row) as env:
                env.set_wrapper_attr(name, value)

    @contextlib.contextmanager
    def _env(self, row: int) -> Iterator[Any]:
        if self.envs[row] is None:
            raise RuntimeError(f"slot {self.first + row} has no env: it failed and was not restarted")
        with self.calling(row):
            yield self.envs[row]

    def close(self) -> None:
        """Closes each env once; goes on past those that raise."""
        for row, env in enumerate(self.envs):
            self.envs[row] = None
            if env is not None:
                with contextlib.suppress(Exception), self.calling(row):  # nobody waits for the answer
                    env.close()
