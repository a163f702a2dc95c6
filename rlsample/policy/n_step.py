"""Returns over a few steps, as a pure function over arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlsample.errors import ConfigError

__all__ = ["NStep", "compute_n_step"]


class NStep(NamedTuple):
    """What :func:`compute_n_step` gives.

    Attributes:
        returns: float32[N], discounted sums of the rewards of each row's window.
        discounts: float32[N], what the value of the observation after the window counts: gamma to the power of the
            window's length, 0 if its last row terminated.
        last: int64[N], the last row of each row's window; its next observation is the one after the window.
    """

    returns: np.ndarray
    discounts: np.ndarray
    last: np.ndarray


def compute_n_step(
    rewards: np.ndarray, terminated: np.ndarray, segment_end: np.ndarray, n_step: int, gamma: float
) -> NStep:
    """Targets are ``returns + discounts * V(observation after row last)`` (Sutton and Barto 2018, equation 7.1).

        returns[i] = sum of gamma ** k * rewards[i + k] for k in 0 .. last[i] - i
        last[i] = the first of: row i + n_step - 1, the first end of a segment from row i on

    So a window is cut short by an end of its segment and still used: after a truncation or a cut it goes on with the
    value of the true next observation, after a termination with 0.

    Args:
        rewards: float[N], the rows of a segment one after another.
        terminated: bool[N], no reward follows; an end of a segment too.
        segment_end: bool[N], the next row does not go on from here: the last of its episode or fragment. The last row
            of all is an end without being marked.
        n_step: length of a window, at least 1.
        gamma: discount in [0, 1].

    Raises:
        ConfigError: arrays of other shapes, n_step or gamma out of range.
    """
    count = len(rewards)
    if rewards.ndim != 1 or terminated.shape != (count,) or segment_end.shape != (count,):
        shapes = f"{rewards.shape}, {terminated.shape}, {segment_end.shape}"
        raise ConfigError(f"rewards, terminated and segment_end must be of one length, not of the shapes {shapes}")
    if n_step < 1 or not 0 <= gamma <= 1:
        raise ConfigError(f"n_step must be at least 1 and gamma in [0, 1], not {n_step}, {gamma}")
    position = np.arange(count)
    ends = segment_end | terminated
    ends[-1:] = True
    stops = np.flatnonzero(ends)
    last = np.minimum(position + n_step - 1, stops[np.searchsorted(stops, position)] if count else position)
    returns = rewards.astype(np.float64)
    for k in range(1, min(n_step, count)):
        longer = position[: count - k][last[: count - k] >= position[k:]]
        returns[longer] += gamma**k * rewards[longer + k]
    discounts = np.where(terminated[last], 0.0, float(gamma) ** (last - position + 1))
    return NStep(returns.astype(np.float32), discounts.astype(np.float32), last)
