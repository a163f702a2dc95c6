"""What lies between a user's gymnasium env and us: the standard wrappers, and what old envs return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

__all__ = ["NO_LIMIT", "bad_number", "bad_result", "peel"]

NO_LIMIT = 1 << 62


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
