"""Advantages and returns as pure functions over arrays.

Rows are given as [T, B] (time-major) or flat [N] (env-major: the rows of a segment lie one after another). A *segment*
is what belongs together in time: an episode, or the part of one that a fragment holds. ``next_values`` is the value of
each row's true next observation, so that an episode's last row sees its final observation and a cut row the observation
after the cut, and no row of another segment is ever used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsample.errors import ConfigError

__all__ = ["compute_gae", "discounted_returns"]


def compute_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    segment_end: np.ndarray,
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).

        delta[i] = rewards[i] + gamma * next_values[i] * (not terminated[i]) - values[i]
        advantage[i] = delta[i] + gamma * lam * advantage[i + 1]      (the second term only inside a segment)

    Args:
        rewards: float [T, B] or [N].
        values: float, V of the rows' own observations.
        next_values: float, V of the rows' next observations; unused, so it may be anything finite, where terminated.
        terminated: bool, no reward follows.
        segment_end: bool, the row is the last of its episode or fragment. A terminated row and the last row of the
            arrays (of each column, for [T, B]) are ends without being marked.
        gamma: discount in [0, 1].
        lam: GAE's lambda in [0, 1]; 1 gives discounted returns minus values.

    Returns:
        ``(advantages, value_targets)``, fresh float32 arrays of the rewards' shape; targets are advantages + values.

    Raises:
        ConfigError: shapes differ, an array is not 1-D or 2-D, flags are not bool, or gamma or lam is out of range.
    """
    arrays = {"values": values, "next_values": next_values, "terminated": terminated, "segment_end": segment_end}
    _check(rewards, arrays, gamma=gamma, lam=lam)
    advantages = next_values.astype(np.float64)
    np.multiply(advantages, gamma, out=advantages)
    advantages[terminated] = 0.0
    advantages += rewards
    advantages -= values
    _accumulate(advantages, gamma * lam, terminated | segment_end)
    targets = advantages + values
    return advantages.astype(np.float32), targets.astype(np.float32)


def discounted_returns(
    rewards: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    segment_end: np.ndarray,
    gamma: float,
) -> np.ndarray:
    """Discounted sum of a segment's rewards, then the value of what follows its last row (0 where it terminated).

    Arguments, checks and shapes as in :func:`compute_gae`; ``next_values`` counts only at segment ends.

    Returns:
        A fresh float32 array of the rewards' shape.
    """
    arrays = {"next_values": next_values, "terminated": terminated, "segment_end": segment_end}
    _check(rewards, arrays, gamma=gamma)
    end = terminated | segment_end
    end[-1:] = True
    returns = rewards.astype(np.float64)
    bootstrapped = end & ~terminated
    returns[bootstrapped] += gamma * next_values[bootstrapped].astype(np.float64)
    _accumulate(returns, gamma, end)
    return returns.astype(np.float32)


def _accumulate(x: np.ndarray, factor: float, end: np.ndarray) -> None:
    """In place, along the first axis: ``x[i] += factor * x[i + 1]`` from the back, except where ``end[i]``.

    Instead of one step per row it doubles the span that each row has summed up, so that the longest segment of L rows
    takes log2(L) passes over whole arrays, whatever the segments' lengths are.
    """
    carry = np.where(end, 0.0, factor)
    span = 1
    while span < len(x) and carry[:-span].any():
        x[:-span] += carry[:-span] * x[span:]
        carry[:-span] *= carry[span:]
        span *= 2


def _check(rewards: np.ndarray, arrays: dict[str, np.ndarray], **factors: float) -> None:
    if rewards.ndim not in (1, 2):
        raise ConfigError(f"rewards have shape {rewards.shape}; expected flat rows [N] or time-major [T, B]")
    named: dict[str, Any] = arrays
    for name, array in named.items():
        if array.shape != rewards.shape:
            raise ConfigError(f"{name} has shape {array.shape}, rewards have {rewards.shape}")
        if name in ("terminated", "segment_end") and array.dtype != np.bool_:
            raise ConfigError(f"{name} has dtype {array.dtype}; expected bool")
    for name, factor in factors.items():
        if not 0.0 <= factor <= 1.0:
            raise ConfigError(f"{name} is {factor}; expected a number in [0, 1]")
