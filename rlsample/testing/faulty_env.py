"""An env that fails on purpose, for tests of pools and samplers."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsample.env.base_env import EnvContext
from rlsample.testing.scripted import CountEnv

__all__ = ["Fault", "FaultyEnv", "faulty_factory"]

_KINDS = ("raise", "exit", "kill", "hang", "stop")
_CALLS = ("init", "reset", "step")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        kind: ``raise`` a RuntimeError("broken on purpose"), ``exit`` the process with code 3, ``kill`` it, ``hang`` in
            the call, or ``stop`` the process (SIGSTOP).
        at: the number of the call, from 1, over the env's life.
        call: ``step``, ``reset`` or ``init``.
        incarnations: how many incarnations of the slot's env fail; the later ones are well.
    """

    kind: str = "raise"
    at: int = 1
    call: str = "step"
    incarnations: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or self.call not in _CALLS:
            raise ValueError(f"kind must be one of {_KINDS} and call one of {_CALLS}, got {self.kind!r}, {self.call!r}")

    def strike(self) -> None:
        """Does it."""
        if self.kind == "raise":
            raise RuntimeError("broken on purpose")
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            threading.Event().wait(3600)


class FaultyEnv(CountEnv):
    """A :class:`~rlsample.testing.CountEnv` with a fault.

    Args:
        n, end: as there.
        fault: what goes wrong, or None.
        log: a file that gets a line per call, such as ``make 2``: the call and the slot. Lines of several processes do
            not mix.
        slot: for the log.
        step_s, reset_s: how long these calls sleep.
    """

    def __init__(
        self,
        n: int = 5,
        end: str = "term",
        fault: Fault | None = None,
        log: str | Path | None = None,
        slot: int = 0,
        step_s: float = 0.0,
        reset_s: float = 0.0,
    ) -> None:
        super().__init__(n, end)
        self.fault, self.log, self.slot, self.step_s, self.reset_s = fault, log, slot, step_s, reset_s
        self._note("make")
        self._maybe_fail("init", 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._note("reset")
        self._maybe_fail("reset", self.resets + 1)
        time.sleep(self.reset_s)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._note("step")
        self._maybe_fail("step", self.steps + 1)
        time.sleep(self.step_s)
        return super().step(action)

    def close(self) -> None:
        self._note("close")
        super().close()

    def _maybe_fail(self, call: str, number: int) -> None:
        if self.fault is not None and self.fault.call == call and self.fault.at == number:
            self.fault.strike()

    def _note(self, call: str) -> None:
        if self.log is not None:
            fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(fd, f"{call} {self.slot}\n".encode())
            os.close(fd)


def faulty_factory(faults: Mapping[int, Fault] | None = None, **options: Any) -> Callable[[EnvContext], FaultyEnv]:
    """A factory that can be sent to other processes: slot -> its fault; ``options`` go to every env."""
    return functools.partial(_make, dict(faults or {}), options)


def _make(faults: Mapping[int, Fault], options: Mapping[str, Any], ctx: EnvContext) -> FaultyEnv:
    fault = faults.get(ctx.slot_index)
    if fault is not None and ctx.incarnation >= fault.incarnations:
        fault = None
    return FaultyEnv(fault=fault, slot=ctx.slot_index, **options)
