"""The diagonal Gaussian for Box actions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import gymnasium
import numpy as np

from rlsample.errors import SpaceError
from rlsample.policy.distributions import ActionDistribution, Score

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DiagonalGaussian"]

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class DiagonalGaussian(ActionDistribution):
    """Independent normals, one per element of a Box of any shape, ``()`` included.

    Inputs: d means, then d log standard deviations. Actions may lie outside the bounds. Of an integer Box they are the
    nearest integers that the dtype holds; their logp is the density there.
    """

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        self._shape = tuple(space.shape)
        self._dtype = np.dtype(space.dtype)
        self._size = int(np.prod(self._shape))
        if self._size == 0:
            raise SpaceError(f"action space {space} has no elements")
        self._limits: tuple[float, float] | None = None
        if self._dtype.kind in "iu":
            info = np.iinfo(self._dtype.name)
            # The largest 64-bit integers are no floats: stay well inside, so that the cast cannot wrap.
            self._limits = (max(info.min, -(2.0**62)), min(info.max, 2.0**62))
        self.num_outputs = self._size
        self.num_free = self._size
        self.noise_kinds = (("normal", self._size),)

    def _actions(self, flat: np.ndarray) -> np.ndarray:
        if self._limits is not None:
            flat = np.clip(np.rint(flat.astype(np.float64)), *self._limits)
        return flat.astype(self._dtype, copy=False).reshape(len(flat), *self._shape)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        d = self._size
        return self._actions(inputs[:, :d] + np.exp(inputs[:, d:]) * noise)

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        return self._actions(inputs[:, : self._size].copy())

    def score(self, inputs: np.ndarray, actions: np.ndarray) -> Score:
        d = self._size
        inverse = np.exp(-inputs[:, d:])
        z = (actions.reshape(len(actions), d) - inputs[:, :d]).astype(np.float32, copy=False) * inverse
        entropy = inputs[:, d:].sum(1) + np.float32(d * (0.5 + HALF_LOG_2PI))

        def gradient(d_logp: np.ndarray, d_entropy: float) -> np.ndarray:
            d_inputs = np.empty_like(inputs)
            np.multiply(z * inverse, d_logp[:, None], out=d_inputs[:, :d])
            np.multiply(z * z - 1, d_logp[:, None], out=d_inputs[:, d:])
            d_inputs[:, d:] += d_entropy
            return d_inputs

        return Score(self._density(z, inputs), entropy, gradient)

    def _density(self, z: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        d = self._size
        squares = np.multiply(z, z) * 0.5
        squares += inputs[:, d:]
        total = squares.sum(1)
        return np.subtract(-d * HALF_LOG_2PI, total, dtype=np.float32)

    def act(self, inputs: np.ndarray, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if noise is None or self._limits is not None:
            return super().act(inputs, noise)
        return self.sample(inputs, noise), self._density(noise, inputs)

    def logp_torch(self, inputs: Tensor, actions: Tensor) -> Tensor:
        d = self._size
        log_std = inputs[:, d:]
        z = (actions.reshape(-1, d) - inputs[:, :d]) * (-log_std).exp()
        return -(0.5 * z * z + log_std).sum(1) - d * HALF_LOG_2PI

    def entropy_torch(self, inputs: Tensor) -> Tensor:
        return inputs[:, self._size :].sum(1) + self._size * (0.5 + HALF_LOG_2PI)

    def kl_torch(self, inputs: Tensor, other: Tensor) -> Tensor:
        d = self._size
        log_p, log_q = inputs[:, d:], other[:, d:]
        spread = ((log_p - log_q) * 2).exp() + ((inputs[:, :d] - other[:, :d]) * (-log_q).exp()).square()
        return (log_q - log_p + 0.5 * spread - 0.5).sum(1)
