"""How a worker of a pool ended, in words."""

from __future__ import annotations

from dataclasses import dataclass

from rlsample.errors import EnvFailedError
from rlsample.nursery import killer

__all__ = ["Death", "ending"]


@dataclass(frozen=True)
class Death:
    """How a worker ended.

    Attributes:
        worker: its index.
        slot: the slot whose code it ran, or -1.
        how: such as ``"exited with code 3"``.
    """

    worker: int
    slot: int
    how: str

    def failure(self, slot: int, episode_step: int | None) -> EnvFailedError:
        """What its slot ``slot`` is told."""
        at = f"slot {slot}" + ("" if episode_step is None else f", episode step {episode_step}")
        doing = "" if self.slot < 0 else " in this env" if self.slot == slot else f" in the env of slot {self.slot}"
        text = f"worker {self.worker} {self.how}{doing}"
        return EnvFailedError(f"{at}: {text}", slot=slot, episode_step=episode_step, remote_traceback=text)


def ending(code: int | None) -> str:
    """What an exit code says; None: nobody knows it."""
    if code is None:
        return "is gone, with the process that started it"
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {killer(code)}"
