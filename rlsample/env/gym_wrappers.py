"""What lies between a user's gymnasium env and us: the standard wrappers, and what old envs return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rlsample.errors import EnvFailedError

__all__ = ["NO_LIMIT", "all_bools", "all_dicts", "bad_number", "bad_result", "coerce_flags", "coerce_info", "peel"]

NO_LIMIT = 1 << 62
_BOOLS, _DICTS = {bool, np.bool_}, {dict, type(None)}


def peel(env: gymnasium.Env[Any, Any]) -> tuple[Callable[[Any], Any], int]:
    """The env's ``step`` beneath the wrappers that ``gymnasium.make`` adds, and the time limit found there.

    The time limit is kept by the caller, step order by the slot states, and results are checked here anyway: a fifth of
    the cost of a small env's step. Any other wrapper stays, with all that lies beneath it.
    """
    limit = NO_LIMIT
    while type(env) in (TimeLimit, OrderEnforcing, PassiveEnvChecker):
        if type(env) is TimeLimit:
            limit = min(limit, int(env._max_episode_steps))
        env = env.env  # type: ignore[attr-defined]
    return env.step, limit


def bad_number(at: str, path: str, value: float) -> str:
    """What to say of an observation with NaN or inf; ``at`` names the slot and the step."""
    place = f" at {path}" if path else ""
    return f"{at}: observation{place} holds {value}; mend the env, or set allow_nonfinite=True"


def bad_result(result: Any, slot: int, step: int) -> str:
    """The message for a step that did not return five values."""
    at = f"slot {slot}, episode step {step}: step returned"
    if isinstance(result, tuple) and len(result) == 4:
        return (
            f"{at} 4 values (obs, reward, done, info), as old gym envs do; expected obs, reward, terminated, "
            "truncated, info. Wrap the env with Shimmy (pip install shimmy[gym-v21]): "
            "gymnasium.make('GymV21Environment-v0', env=env)"
        )
    got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
    return f"{at} {got}, expected the tuple (obs, reward, terminated, truncated, info)"


def all_bools(*columns: Iterable[Any]) -> bool:
    """Whether every flag is a plain bool; those that are not need :func:`coerce_flags`."""
    return all(set(map(type, column)) <= _BOOLS for column in columns)


def all_dicts(infos: Iterable[Any]) -> bool:
    """Whether every info is a dict or None; those that are not need :func:`coerce_info`."""
    return set(map(type, infos)) <= _DICTS


def coerce_flags(terminated: Any, truncated: Any, slot: int, step: int) -> tuple[bool, bool]:
    """Both flags as bools: from bools, numbers, arrays of shape () or (1,), and None, which is False.

    Raises:
        EnvFailedError: anything else; names slot, step and value.
    """
    found = []
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        array = np.asarray(False if flag is None else flag)
        if array.shape not in ((), (1,)) or array.dtype.kind not in "biuf":
            what = f"slot {slot}, episode step {step}: {name} is {repr(flag)[:80]}, expected True or False"
            raise EnvFailedError(what, slot=slot, episode_step=step)
        found.append(bool(array.reshape(())))
    return found[0], found[1]


def coerce_info(info: Any, slot: int, step: int | None) -> Any:
    """An info as it is, if it is a mapping or None; ``step`` None: of a reset.

    Raises:
        EnvFailedError: anything else; names slot, step and value.
    """
    if info is None or isinstance(info, Mapping):
        return info
    at = f"slot {slot}" + (": reset's info" if step is None else f", episode step {step}: the info")
    what = f"{at} is {repr(info)[:80]}, expected a dict"
    raise EnvFailedError(what, slot=slot, episode_step=step)
