"""Losses of actor-critic methods with their gradients in closed form: pure functions on arrays [N].

They take one number per row, log-probabilities and values, and give the gradient with respect to them, from which torch
goes on through the model. A dozen calls on a few hundred numbers are done here before torch has dispatched a few.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["Surrogate", "clipped_surrogate", "explained_variance", "mean", "policy_gradient", "value_loss"]


class Surrogate(NamedTuple):
    """Loss, gradient float32[N] with respect to ``logp``, and what happened to the ratio."""

    loss: float
    d_logp: np.ndarray
    approx_kl: float
    clip_fraction: float


def clipped_surrogate(logp: np.ndarray, old_logp: np.ndarray, advantages: np.ndarray, clip: float) -> Surrogate:
    """PPO's loss (Schulman et al. 2017, arXiv:1707.06347, equation 7).

        ratio = exp(logp - old_logp)
        loss = -mean(min(ratio * advantage, clamp(ratio, 1 - clip, 1 + clip) * advantage))

    ``approx_kl`` is mean(ratio - 1 - log(ratio)), the estimator k3 of http://joschu.net/blog/kl-approx.html;
    ``clip_fraction`` the part of the rows whose ratio is outside the range.
    """
    num = len(logp)
    log_ratio = logp - old_logp
    ratio = np.exp(log_ratio)
    gain = ratio * advantages
    clipped = np.minimum(np.maximum(ratio, 1 - clip), 1 + clip) * advantages
    # Where the minimum is the clipped term, and differs, it does not depend on logp.
    d_logp = np.where(gain <= clipped, gain, np.float32(0)) * np.float32(-1 / num)
    ratio -= 1
    outside = int(np.count_nonzero(np.abs(ratio) > clip))
    return Surrogate(-mean(np.minimum(gain, clipped)), d_logp, mean(ratio - log_ratio), outside / num)


def policy_gradient(logp: np.ndarray, advantages: np.ndarray) -> tuple[float, np.ndarray]:
    """``-mean(logp * advantages)`` and its gradient with respect to ``logp``."""
    return -float(logp.dot(advantages)) / len(logp), advantages * np.float32(-1 / len(logp))


def value_loss(
    values: np.ndarray, targets: np.ndarray, old_values: np.ndarray | None = None, clip: float | None = None
) -> tuple[float, np.ndarray]:
    """Mean squared error and its gradient with respect to ``values``.

    With ``clip``, predictions are held within that distance of ``old_values``, and those outside get no gradient.
    """
    error = values - targets
    gradient = error
    if clip is not None and old_values is not None:
        moved = values - old_values
        error = np.clip(moved, -clip, clip) + old_values - targets
        gradient = np.where(np.abs(moved) <= clip, error, np.float32(0))
    return float(error.dot(error)) / len(error), gradient * np.float32(2 / len(error))


def explained_variance(values: np.ndarray, targets: np.ndarray) -> float:
    """``1 - var(targets - values) / var(targets)``; 0 where the targets are constant."""
    spread = _variance(targets)
    return 1.0 - _variance(targets - values) / spread if spread > 0 else 0.0


def mean(x: np.ndarray) -> float:
    """The mean of float32[N]; quicker than ``x.mean()`` on short arrays."""
    return float(np.add.reduce(x)) / len(x)


def _variance(x: np.ndarray) -> float:
    x = x - np.float32(mean(x))
    return float(x.dot(x)) / len(x)
