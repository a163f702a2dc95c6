"""Categorical, multi-categorical and Bernoulli distributions; contract in :mod:`rlsample.policy.distributions`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from rlsample.errors import SpaceError
from rlsample.policy.distributions import MASKED_LOGIT, ActionDistribution, Score

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Bernoulli", "Categorical", "MultiCategorical"]

SCALAR_MAX_CHOICES = 16
"""Up to here one row is quicker in plain Python floats than in calls on arrays of length 1."""


BERNOULLI_LIMIT = 80.0
"""Logits beyond change neither probability nor entropy in float32, but would overflow on the way."""


class _Softmax:
    """The score of K rows of independent categoricals: logits [K * parts, n], chosen indices int [K * parts]."""

    def __init__(self, logits: np.ndarray, chosen: np.ndarray, ones: np.ndarray, parts: int = 1) -> None:
        z = logits - np.maximum.reduce(logits, axis=1, keepdims=True)
        np.maximum(z, np.float32(MASKED_LOGIT), out=z)
        p = np.exp(z)
        total = p.dot(ones)
        p *= (1 / total)[:, None]
        self._at = (np.arange(len(z)), chosen)
        self._p, self._z, self._parts = p, z, parts
        self._mean_z = np.multiply(p, z).dot(ones)
        log_total = np.log(total)
        self.logp = self._per_row(z[self._at] - log_total)
        self.entropy = self._per_row(log_total - self._mean_z)

    def _per_row(self, x: np.ndarray) -> np.ndarray:
        return x if self._parts == 1 else x.reshape(-1, self._parts).sum(1)

    def gradient(self, d_logp: np.ndarray, d_entropy: float) -> np.ndarray:
        """With respect to the logits, [K * parts, n]."""
        if self._parts > 1:
            d_logp = np.repeat(d_logp, self._parts)
        d = self._p * -d_logp[:, None]
        d[self._at] += d_logp
        if d_entropy:
            d -= np.float32(d_entropy) * self._p * (self._z - self._mean_z[:, None])
        return d


class Categorical(ActionDistribution):
    """One of n choices, ``start`` to ``start + n - 1``. Sampled by the Gumbel-max trick."""

    def __init__(self, space: gymnasium.spaces.Discrete) -> None:
        self._n = n = int(space.n)
        self._start = int(space.start)
        self._dtype = np.dtype(space.dtype)
        self._ones = np.ones(n, np.float32)
        self.num_outputs = n
        self.noise_kinds = (("gumbel", n),)
        self.mask_sizes = (n,)

    def _actions(self, index: np.ndarray) -> np.ndarray:
        if self._start:
            index = index + self._start
        return index.astype(self._dtype, copy=False)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return self._actions((inputs + noise).argmax(1))

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        return self._actions(inputs.argmax(1))

    def score(self, inputs: np.ndarray, actions: np.ndarray) -> Score:
        chosen = actions - self._start if self._start else actions
        softmax = _Softmax(inputs, chosen, self._ones)
        return Score(softmax.logp, softmax.entropy, softmax.gradient)

    def act(self, inputs: np.ndarray, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        num_rows = len(inputs)
        if num_rows == 1 and self._n <= SCALAR_MAX_CHOICES:
            return self._act_on_one(inputs[0].tolist(), None if noise is None else noise[0].tolist())
        index = (inputs if noise is None else inputs + noise).argmax(1)
        chosen = inputs.ravel().take(index + np.arange(0, num_rows * self._n, self._n))
        # The chosen logit stands in for the largest one: noise spans some 30 nats, so that exp cannot overflow.
        logp = np.log(np.exp(inputs - chosen[:, None]).dot(self._ones))
        return self._actions(index), np.negative(logp, logp)

    def _act_on_one(self, logits: list[float], noise: list[float] | None) -> tuple[np.ndarray, np.ndarray]:
        scores = logits if noise is None else [x + g for x, g in zip(logits, noise, strict=True)]
        index = scores.index(max(scores))
        top = max(logits)
        total = 0.0
        for x in logits:
            total += math.exp(x - top)
        logp = logits[index] - top - math.log(total)
        return np.array((index + self._start,), self._dtype), np.array((logp,), np.float32)

    def logp_torch(self, inputs: Tensor, actions: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        index = actions.long()
        return -cross_entropy(inputs, index - self._start if self._start else index, reduction="none")

    def entropy_torch(self, inputs: Tensor) -> Tensor:
        logp = inputs.clamp_min(MASKED_LOGIT).log_softmax(1)
        return -(logp.exp() * logp).sum(1)

    def kl_torch(self, inputs: Tensor, other: Tensor) -> Tensor:
        p, q = (x.clamp_min(MASKED_LOGIT).log_softmax(1) for x in (inputs, other))
        return (p.exp() * (p - q)).sum(1)


class MultiCategorical(ActionDistribution):
    """Independent categoricals with ``nvec`` choices each (``nvec`` of any shape), counted from ``start``."""

    def __init__(self, space: gymnasium.spaces.MultiDiscrete) -> None:
        sizes = space.nvec.reshape(-1).astype(int)
        if len(sizes) == 0:
            raise SpaceError(f"action space {space} has no elements")
        self._shape = tuple(space.nvec.shape)
        self._start = np.asarray(space.start).reshape(-1)
        self._dtype = np.dtype(space.dtype)
        self._parts, self._widest = len(sizes), int(sizes.max())
        # Input column of each place in the padded [parts, widest] table; one column past the inputs pads.
        place = np.arange(self._widest)
        begin = np.cumsum(sizes) - sizes
        self._table = np.where(place < sizes[:, None], begin[:, None] + place, sizes.sum()).reshape(-1)
        self._padded = bool((sizes != self._widest).any())
        self._real = np.flatnonzero(self._table < sizes.sum())
        self._ones = np.ones(self._widest, np.float32)
        self.num_outputs = int(sizes.sum())
        self.noise_kinds = (("gumbel", self.num_outputs),)
        self.mask_sizes = tuple(sizes.tolist())

    def _logits(self, inputs: np.ndarray) -> np.ndarray:
        """[K, parts, widest], padded with the masked logit."""
        if self._padded:
            padded = np.full((len(inputs), self.num_outputs + 1), MASKED_LOGIT, np.float32)
            padded[:, :-1] = inputs
            inputs = padded[:, self._table]
        return inputs.reshape(len(inputs), self._parts, self._widest)

    def _actions(self, index: np.ndarray) -> np.ndarray:
        return (index + self._start).astype(self._dtype, copy=False).reshape(len(index), *self._shape)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return self._actions(self._logits(inputs + noise).argmax(2))

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        return self._actions(self._logits(inputs).argmax(2))

    def score(self, inputs: np.ndarray, actions: np.ndarray) -> Score:
        chosen = (actions.reshape(len(actions), self._parts) - self._start).astype(np.int64, copy=False)
        logits = self._logits(inputs).reshape(-1, self._widest)
        softmax = _Softmax(logits, chosen.reshape(-1), self._ones, self._parts)

        def gradient(d_logp: np.ndarray, d_entropy: float) -> np.ndarray:
            return softmax.gradient(d_logp, d_entropy).reshape(len(inputs), -1)[:, self._real]

        return Score(softmax.logp, softmax.entropy, gradient)

    def _logp_all(self, inputs: Tensor) -> Tensor:
        """Log-probabilities [K, parts, widest]."""
        import torch

        if self._padded:
            padded = torch.nn.functional.pad(inputs, (0, 1), value=MASKED_LOGIT)
            inputs = padded.index_select(1, torch.from_numpy(self._table).to(inputs.device))
        return inputs.reshape(len(inputs), self._parts, self._widest).log_softmax(2)

    def logp_torch(self, inputs: Tensor, actions: Tensor) -> Tensor:
        index = actions.long().reshape(-1, self._parts)
        index = index - index.new_tensor(self._start.tolist())
        return self._logp_all(inputs).gather(2, index[..., None])[..., 0].sum(1)

    def entropy_torch(self, inputs: Tensor) -> Tensor:
        logp = self._logp_all(inputs.clamp_min(MASKED_LOGIT))
        return -(logp.exp() * logp).sum((1, 2))

    def kl_torch(self, inputs: Tensor, other: Tensor) -> Tensor:
        p, q = (self._logp_all(x.clamp_min(MASKED_LOGIT)) for x in (inputs, other))
        return (p.exp() * (p - q)).sum((1, 2))


class Bernoulli(ActionDistribution):
    """Independent bits of a MultiBinary of any shape; inputs are the logits of a 1."""

    def __init__(self, space: gymnasium.spaces.MultiBinary) -> None:
        self._shape = tuple(space.shape)
        self._dtype: np.dtype[Any] = np.dtype(space.dtype)
        self._size = int(np.prod(self._shape))
        if self._size == 0:
            raise SpaceError(f"action space {space} has no elements")
        self.num_outputs = self._size
        self.noise_kinds = (("logistic", self._size),)

    def _actions(self, ones: np.ndarray) -> np.ndarray:
        return ones.astype(self._dtype).reshape(len(ones), *self._shape)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return self._actions(inputs + noise > 0)

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        return self._actions(inputs > 0)

    def score(self, inputs: np.ndarray, actions: np.ndarray) -> Score:
        bits = actions.reshape(len(actions), self._size).astype(np.float32)
        logp = -np.logaddexp(np.float32(0), (1 - 2 * bits) * inputs).sum(1)
        x = np.clip(inputs, np.float32(-BERNOULLI_LIMIT), np.float32(BERNOULLI_LIMIT))
        p = 1 / (1 + np.exp(-x))
        entropy = (np.logaddexp(np.float32(0), x) - x * p).sum(1)

        def gradient(d_logp: np.ndarray, d_entropy: float) -> np.ndarray:
            return (bits - p) * d_logp[:, None] - np.float32(d_entropy) * (x * p * (1 - p))

        return Score(logp, entropy, gradient)

    def logp_torch(self, inputs: Tensor, actions: Tensor) -> Tensor:
        from torch.nn.functional import softplus

        sign = actions.reshape(-1, self._size).to(inputs.dtype) * -2 + 1
        return -softplus(sign * inputs).sum(1)

    def entropy_torch(self, inputs: Tensor) -> Tensor:
        from torch.nn.functional import softplus

        inputs = inputs.clamp(-BERNOULLI_LIMIT, BERNOULLI_LIMIT)
        return (softplus(inputs) - inputs * inputs.sigmoid()).sum(1)

    def kl_torch(self, inputs: Tensor, other: Tensor) -> Tensor:
        from torch.nn.functional import softplus

        return (inputs.sigmoid() * (inputs - other) - softplus(inputs) + softplus(other)).sum(1)
