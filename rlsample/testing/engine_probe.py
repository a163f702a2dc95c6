"""An object whose every answer is known, to run on an engine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Probe", "UnpicklableError", "fail_to_build"]

_PATIENCE_S = 30.0


class UnpicklableError(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Probe:
    """Made by ``functools.partial(Probe, folder)`` as an engine's factory.

    Args:
        folder: where :meth:`close` leaves a file ``closed-INDEX-INCARNATION``.
    """

    def __init__(self, folder: str, index: int, incarnation: int) -> None:
        self.folder, self.index, self.incarnation = Path(folder), index, incarnation
        self.seen: list[Any] = []
        self.kept: Any = None
        self.own = {n: np.arange(n, dtype=np.float32) for n in (3, 100_000)}

    def identify(self) -> tuple[int, int]:
        return self.index, self.incarnation

    def echo(self, value: Any) -> Any:
        return value

    def add(self, value: Any) -> list[Any]:
        """All that was added so far."""
        self.seen.append(value)
        return list(self.seen)

    def keep(self, value: Any) -> None:
        self.kept = value

    def give_kept(self) -> Any:
        return self.kept

    def kept_is_writable(self) -> bool:
        """Of a dict of arrays."""
        return any(array.flags.writeable for array in self.kept.values())

    def give_own(self, size: int) -> np.ndarray:
        """An array the probe goes on using; 3 or 100,000 values."""
        return self.own[size]

    def fail(self, message: str) -> None:
        raise KeyError(message)

    def fail_chained(self, message: str) -> None:
        try:
            raise FloatingPointError(message)
        except FloatingPointError as e:
            raise RuntimeError("outer") from e

    def fail_unpicklably(self, message: str) -> None:
        raise UnpicklableError(message)

    def surroundings(self) -> dict[str, Any]:
        """Threads of the process, those that BLAS is told to use, and whether torch is loaded."""
        variables = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        return {"threads": threading.active_count(), "torch": "torch" in sys.modules, **variables}

    def give_lock(self) -> Any:
        """What cannot be pickled."""
        return threading.Lock()

    def refuse(self, value: Any) -> None:
        raise ValueError(f"refused {value}")

    def block(self, path: str) -> str:
        """Returns once there is a file, or the folder is gone; gives up after half a minute."""
        deadline = time.monotonic() + _PATIENCE_S
        while not Path(path).exists() and self.folder.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(path)
            time.sleep(0.001)
        return path

    def announce_and_block(self, announced: str, path: str) -> str:
        """Makes one file, then waits for another."""
        Path(announced).touch()
        return self.block(path)

    def doze(self, seconds: float) -> float:
        """Answers after a while."""
        time.sleep(seconds)
        return seconds

    def exit(self, code: int) -> None:
        """Ends the whole process at once."""
        os._exit(code)

    def kill(self) -> None:
        """Kills the whole process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        with open(self.folder / f"closed-{self.index}-{self.incarnation}", "a") as file:
            file.write("x")


def fail_to_build(index: int, incarnation: int) -> Any:
    """A factory that raises."""
    raise ValueError(f"no-9 at {index}")
