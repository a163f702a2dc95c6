"""Which slot waits for what: the state machine that every polled env shares.

NEW --first poll--> WAITING --send--> BUSY --poll--> WAITING, ENDED or FAILED
WAITING, ENDED --try_reset--> WAITING or RESETTING --poll--> WAITING        FAILED --try_restart--> RESETTING
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rlsample.errors import EnvProtocolError

__all__ = ["BUSY", "ENDED", "FAILED", "NEW", "RESETTING", "WAITING", "SlotStates"]

NEW: Final = 0
WAITING: Final = 1
BUSY: Final = 2
ENDED: Final = 3
RESETTING: Final = 4
FAILED: Final = 5

_MEANING = (
    "not yet started (call poll first)",
    "waiting for an action",
    "busy with an action (poll returns its row)",
    "at its episode's end (call try_reset)",
    "resetting (poll returns its first observation)",
    "failed (call try_restart)",
)
Ids = np.ndarray | Sequence[int]


class SlotStates:
    """The state of each slot. The env moves slots by writing ``code``; the ``require`` methods only look.

    Attributes:
        code: int8[num_envs], one of NEW, WAITING, BUSY, ENDED, RESETTING, FAILED. Write to it freely.
        all_ids: int64[num_envs], 0, 1, ...; read-only. An env that hands out this very array as ``env_ids`` when every
            slot has a row gets the fast path when it comes back.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.code = np.zeros(num_envs, np.int8)
        self.all_ids = np.arange(num_envs)
        self.all_ids.flags.writeable = False
        self._all_waiting = np.full(num_envs, WAITING, np.int8).tobytes()

    def all_waiting(self) -> bool:
        """Whether each slot waits for an action."""
        return self.code.tobytes() == self._all_waiting

    def require_waiting(self, env_ids: Ids) -> np.ndarray:
        """The ids as int64[K], if these slots exist, differ and wait for an action.

        Raises:
            EnvProtocolError: names each offending slot and its state. No state has changed.
        """
        if env_ids is self.all_ids and self.code.tobytes() == self._all_waiting:
            return self.all_ids
        return self._require(env_ids, (WAITING,), "takes no action")

    def require_resettable(self, env_ids: Ids) -> np.ndarray:
        """The ids as int64[K], if these slots exist, differ and have ended or wait for an action. Else as above."""
        return self._require(env_ids, (WAITING, ENDED), "cannot be reset")

    def require_startable(self, env_ids: Ids) -> np.ndarray:
        """The ids as int64[K], if these slots exist, differ and have ended, wait for an action or are new. As above."""
        return self._require(env_ids, (WAITING, ENDED, NEW), "cannot be reset")

    def require_failed(self, env_ids: Ids) -> np.ndarray:
        """The ids as int64[K], if these slots exist, differ and have failed. Else as above."""
        return self._require(env_ids, (FAILED,), "cannot be restarted")

    def nothing_pending(self) -> EnvProtocolError:
        """The error of a poll that would wait for ever: which slots wait for what. For the caller to raise."""
        return EnvProtocolError(f"poll has nothing to wait for: {self.describe()}")

    def describe(self) -> str:
        """``slots 0, 2: waiting for an action; slot 1: at its episode's end (call try_reset)``."""
        parts = []
        for code, meaning in enumerate(_MEANING):
            slots = np.flatnonzero(self.code == code)
            if len(slots):
                names = ", ".join(map(str, slots[:8])) + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")
                parts.append(f"slot{'s' if len(slots) > 1 else ''} {names}: {meaning}")
        return "; ".join(parts)

    def _require(self, env_ids: Ids, allowed: tuple[int, ...], refusal: str) -> np.ndarray:
        ids = np.asarray(env_ids)
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise EnvProtocolError(f"env_ids must be integers [K], got shape {ids.shape} of {ids.dtype}")
        ids = ids.astype(np.int64, copy=False)
        if len(ids) > 8 and self._granted(ids, allowed):
            return ids
        seen: set[int] = set()
        wrong = []
        for slot in ids.tolist():
            if not 0 <= slot < self.num_envs:
                wrong.append(f"slot {slot} does not exist (slots are 0 to {self.num_envs - 1})")
            elif slot in seen:
                wrong.append(f"slot {slot} is named twice")
            elif self.code[slot] not in allowed:
                wrong.append(f"slot {slot} {refusal}: it is {_MEANING[self.code[slot]]}")
            seen.add(slot)
        if wrong:
            raise EnvProtocolError("; ".join(wrong))
        return ids

    def _granted(self, ids: np.ndarray, allowed: tuple[int, ...]) -> bool:
        """The usual answer, for ids in rising order, without a loop over slots."""
        if ids[0] < 0 or ids[-1] >= self.num_envs or 0 in (ids[1:] > ids[:-1]).tobytes():
            return False
        codes = self.code[ids].tobytes()
        granted = codes.count(allowed[0])
        return granted == len(ids) or granted + sum(codes.count(code) for code in allowed[1:]) == len(ids)
