"""Rows that were acted elsewhere, many at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlsample.env.serving.lane_rows import MAX_REWARD
from rlsample.errors import SpaceError
from rlsample.serving.episode_calls import EpisodeCalls
from rlsample.serving.http_errors import HttpError
from rlsample.serving.wire import WireError

__all__ = ["log_fragment"]

_COLUMNS = {"obs", "actions", "rewards", "action_logp"}


def log_fragment(calls: EpisodeCalls, call: Any) -> dict[str, Any]:
    """Books the rows of an open episode, as so many log_action and log_returns calls; all of them or none.

    Args:
        call: ``episode_id``; ``rows`` with N rows of the columns ``obs``, ``actions``, ``rewards`` and, where it is
            known, ``action_logp``; ``t`` of the first one; ``final_obs`` and ``truncated``, if the episode ends here.

    Returns:
        ``t``, actions of the episode so far, and ``policy_version``, the current one.

    Raises:
        HttpError: a column that does not fit (named), no such episode, or no room. Nothing was booked.
    """
    episode = calls.find(call.episode_id)
    calls.require_turn(episode, call.t)
    rows = call.rows
    unknown = sorted(str(name) for name in set(rows) - _COLUMNS)
    missing = sorted(_COLUMNS - {"action_logp"} - set(rows))
    if unknown or missing:
        raise HttpError(
            "bad_value", f"rows have the columns {sorted(_COLUMNS)}; missing: {missing}, unknown: {unknown}"
        )
    rewards = _numbers(rows["rewards"], "rewards", None)
    num_rows = len(rewards)
    if not num_rows:
        raise HttpError("bad_value", "a fragment has at least one row")
    logp = _numbers(rows["action_logp"], "action_logp", num_rows) if rows.get("action_logp") is not None else None
    try:
        obs = calls.codec.rows_of(calls.codec.obs_batch(rows["obs"], num_rows))
        actions = calls.codec.action_batch(rows["actions"], num_rows)
        final = None if call.final_obs is None else calls.codec.obs(call.final_obs)
    except (SpaceError, WireError) as e:
        raise HttpError("bad_value", f"rows: {e}") from None
    calls.require_queue_room(episode, num_rows)
    calls.keep_open(episode)
    for row in range(num_rows):
        calls.log_checked(episode, obs[row], actions[row], None if logp is None else logp[row])
        calls.add_reward(episode, rewards[row])
    if final is not None:
        calls.end_checked(episode, final, call.truncated)
    return {"t": episode.t, "policy_version": calls.policy_version()}


def _numbers(value: Any, name: str, length: int | None) -> list[float]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        array = np.zeros((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iuf" or length not in (None, len(array)):
        wanted = "one number for each row" if length is None else f"{length} numbers, as there are rewards"
        raise HttpError("bad_value", f"the column {name} has to hold {wanted}")
    numbers: list[float] = array.astype(np.float64).tolist()
    for row, number in enumerate(numbers):
        if not math.isfinite(number) or abs(number) > MAX_REWARD:
            raise HttpError("bad_value", f"the column {name} holds {number} in row {row}, which is no finite float32")
    return numbers
