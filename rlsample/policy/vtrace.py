"""V-trace: targets from rows that an older policy sampled, as a pure function over arrays.

Letters: T time, B segments side by side, N flat rows. Rows are [T, B] (time-major) or [N] (env-major: the rows of a
segment lie one after another), as in :mod:`rlsample.policy.gae`: a segment is an episode, or the part of one that a
fragment holds, and ``next_values`` is the value of each row's true next observation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlsample.errors import ConfigError

__all__ = ["VTrace", "VTraceClips", "compute_vtrace"]


class VTraceClips(NamedTuple):
    """Where the ratios rho = pi / mu are clipped: thresholds of at least 0; infinity: not at all.

    Attributes:
        rho: in the targets' corrections, which decides for what policy V is learnt.
        c: in the traces, which decides how fast.
        pg_rho: in the policy gradient.
    """

    rho: float = 1.0
    c: float = 1.0
    pg_rho: float = 1.0


_CLIPS = VTraceClips()


class VTrace(NamedTuple):
    """What :func:`compute_vtrace` gives; arrays of the rewards' shape, or tensors if it was given tensors.

    Attributes:
        value_targets: ``vs`` of the paper, what V is trained towards.
        advantages: ``rewards + gamma * vs_next - values``, without the importance weight: PPO's clipped ratio brings
            its own.
        pg_advantages: advantages times ``min(clips.pg_rho, rho)``, for a plain policy gradient.
        rhos: the ratios pi / mu, not clipped.
    """

    value_targets: Any
    advantages: Any
    pg_advantages: Any
    rhos: Any


def compute_vtrace(
    *,
    log_rhos: Any,
    rewards: Any,
    values: Any,
    next_values: Any,
    terminated: Any,
    segment_end: Any,
    gamma: float,
    clips: VTraceClips = _CLIPS,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, arXiv:1802.01561, equation 1 and section 4.2).

        rho[i] = exp(log_rhos[i])
        delta[i] = min(clips.rho, rho[i]) * (rewards[i] + gamma * next_values[i] * (not terminated[i]) - values[i])
        x[i] = delta[i] + gamma * min(clips.c, rho[i]) * x[i + 1]      (the second term only inside a segment)
        vs[i] = values[i] + x[i]
        advantages[i] = rewards[i] + gamma * vs_next[i] * (not terminated[i]) - values[i]

    ``vs_next[i]`` is ``vs[i + 1]`` inside a segment and ``next_values[i]`` at its end. No row is given up for the
    bootstrap: a segment of n rows gives n targets. With ratios of 1 this is GAE with lambda 1.

    Args:
        log_rhos: float [T, B] or [N], log pi(action) - log mu(action): the learner's policy over the sampler's.
        rewards: float.
        values: float, V of the rows' own observations, by the learner's weights.
        next_values: float, V of the rows' next observations; anything finite where terminated.
        terminated: bool, no reward follows.
        segment_end: bool, the row is the last of its episode or fragment (a truncation, a cut). A terminated row and
            the last row of the arrays (of each column, for [T, B]) are ends without being marked.
        gamma: discount in [0, 1].
        clips: thresholds of the ratios.

    All are numpy arrays, or all are torch tensors on one device (without gradients). Arrays are summed in float64 and
    returned as float32, tensors in their own dtype.

    Raises:
        ConfigError: shapes differ, not 1-D or 2-D, flags that are not bool, gamma or a threshold out of range.
    """
    named = {
        "log_rhos": log_rhos,
        "values": values,
        "next_values": next_values,
        "terminated": terminated,
        "segment_end": segment_end,
    }
    _check(rewards, named, gamma, clips)
    xp = _library(rewards)
    if xp is np:
        log_rhos, rewards, values, next_values = (
            np.asarray(x, np.float64) for x in (log_rhos, rewards, values, next_values)
        )
    end = terminated | segment_end
    result = _trace(xp.exp(log_rhos), rewards, values, next_values, terminated, end, gamma, clips)
    return VTrace(*(x.astype(np.float32) for x in result)) if xp is np else result


def _trace(
    rhos: Any,
    rewards: Any,
    values: Any,
    next_values: Any,
    terminated: Any,
    end: Any,
    gamma: float,
    clips: VTraceClips,
) -> VTrace:
    xp = _library(values)
    zero = xp.zeros_like(values)
    next_values = xp.where(terminated, zero, next_values)
    correction = rhos.clip(max=clips.rho) * (rewards + gamma * next_values - values)
    carry = xp.where(end, zero, gamma * rhos.clip(max=clips.c))
    targets = values + _accumulated(correction, carry)
    next_targets = next_values.copy() if xp is np else next_values.clone()
    next_targets[:-1] = xp.where(end[:-1], next_values[:-1], targets[1:])
    advantages = rewards + gamma * next_targets - values
    return VTrace(targets, advantages, rhos.clip(max=clips.pg_rho) * advantages, rhos)


def _accumulated(x: Any, carry: Any) -> Any:
    """In place, along the first axis: ``x[i] += carry[i] * x[i + 1]`` from the back.

    Each pass doubles the span that a row has summed up: L rows take log2(L) passes over whole arrays.
    """
    on_device = not isinstance(x, np.ndarray) and x.device.type != "cpu"
    span = 1
    # The early end would make the host wait for the device.
    while span < len(x) and (on_device or bool((carry[:-span] != 0).any())):
        x[:-span] += carry[:-span] * x[span:]
        carry[:-span] = carry[:-span] * carry[span:]
        span *= 2
    return x


def _library(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def _check(rewards: Any, named: dict[str, Any], gamma: float, clips: VTraceClips) -> None:
    shape = tuple(rewards.shape)
    if len(shape) not in (1, 2):
        raise ConfigError(f"rewards have shape {shape}; expected flat rows [N] or time-major [T, B]")
    for name, array in named.items():
        if tuple(array.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(array.shape)}, rewards have {shape}")
        if name in ("terminated", "segment_end") and not str(array.dtype).endswith("bool"):
            raise ConfigError(f"{name} has dtype {array.dtype}; expected bool")
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma is {gamma}; expected a number in [0, 1]")
    for name, threshold in clips._asdict().items():
        if not threshold >= 0.0:
            raise ConfigError(f"clips.{name} is {threshold}; expected 0 or more")
