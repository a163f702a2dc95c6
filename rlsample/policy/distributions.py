"""Action distributions: pure functions between a model's output rows and actions, in numpy and in torch.

    dist = make_distribution(action_space)
    noise = NoiseStream(dist.noise_kinds, seed=0)
    actions, logp = dist.act(inputs, noise.take(len(inputs)))      # numpy, on the acting path
    loss = -dist.logp_torch(inputs_tensor, actions_tensor).mean()  # torch, on the learning path

A distribution holds shapes and no state: ``inputs`` float32 [K, num_inputs] describe K distributions. A model computes
the first ``num_outputs`` columns from observations; the last ``num_free`` columns (log standard deviations) are
parameters of their own, the same in every row.

=================  ===============================  ======================================================
action space       distribution                     inputs per row
=================  ===============================  ======================================================
Discrete(n)        categorical                      n logits
MultiDiscrete      independent categoricals         sum(nvec) logits, component by component
Box (any shape)    diagonal Gaussian                d means; then d log standard deviations (free)
MultiBinary        independent Bernoullis           d logits
Dict, Tuple        product of the members, in the   outputs of all members, then the free inputs of all
                   order of the space, nested
=================  ===============================  ======================================================

Masks: ``mask`` [K, mask_width] has one entry per logit of the categoricals (Discrete: n; MultiDiscrete: sum(nvec); a
product: those of its members one after another), true or non-zero where the choice is allowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import gymnasium
import numpy as np

from rlsample.errors import SpaceError
from rlsample.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

A = TypeVar("A", np.ndarray, "Tensor")

__all__ = ["MASKED_LOGIT", "ActionDistribution", "ProductDistribution", "Score", "make_distribution"]

MASKED_LOGIT = -1e30
"""Logit of a forbidden choice: its probability is 0 in float32, and no sum or product with it gives NaN."""


class Score(NamedTuple):
    """What learning needs of K inputs and actions.

    Attributes:
        logp: float32[K], log-probability (log-density for a Box) of the actions.
        entropy: float32[K], in nats. Of a Box: the differential entropy.
        gradient: ``(d_logp [K], d_entropy) -> d_inputs``: the gradient of ``sum(d_logp * logp) + d_entropy *
            sum(entropy)`` with respect to the inputs, a fresh float32 [K, num_inputs].
    """

    logp: np.ndarray
    entropy: np.ndarray
    gradient: Callable[[np.ndarray, float], np.ndarray]


class ActionDistribution(ABC):
    """Contract of all distributions. Shapes as in the module's description.

    Attributes:
        num_outputs: input columns that a model computes.
        num_free: input columns that are parameters of their own, after the outputs.
        noise_kinds: what one row of sampling consumes, for :class:`~rlsample.policy.noise.NoiseStream`.
        mask_sizes: sizes of the categoricals, in order; empty: this distribution takes no mask.
    """

    num_outputs: int
    num_free: int = 0
    noise_kinds: tuple[tuple[str, int], ...] = ()
    mask_sizes: tuple[int, ...] = ()

    @property
    def num_inputs(self) -> int:
        """Columns of ``inputs``: num_outputs + num_free."""
        return self.num_outputs + self.num_free

    @property
    def mask_columns(self) -> np.ndarray:
        """int64[mask_width], the input column of each mask entry."""
        return np.arange(sum(self.mask_sizes))

    @abstractmethod
    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> Tree:
        """Draws K actions, in the space's dtype and shape.

        Args:
            noise: float32 [K, noise width] of ``noise_kinds``; row i serves action i alone.
        """

    @abstractmethod
    def mode(self, inputs: np.ndarray) -> Tree:
        """The most likely actions (the first of equals), in the space's dtype and shape."""

    @abstractmethod
    def score(self, inputs: np.ndarray, actions: Tree) -> Score:
        """Log-probabilities and entropies of K rows with their gradients, for learning without autograd."""

    def logp(self, inputs: np.ndarray, actions: Tree) -> np.ndarray:
        """Log-probability, or log-density for a Box, of K actions: float32[K]."""
        return self.score(inputs, actions).logp

    def act(self, inputs: np.ndarray, noise: np.ndarray | None) -> tuple[Tree, np.ndarray]:
        """``(actions, logp)`` of a draw, or of the mode without noise. Subclasses share work between the two."""
        actions = self.mode(inputs) if noise is None else self.sample(inputs, noise)
        return actions, self.logp(inputs, actions)

    @abstractmethod
    def logp_torch(self, inputs: Tensor, actions: Tree) -> Tensor:
        """:meth:`logp` for learning: float32[K], differentiable in the inputs; actions are a tree of tensors."""

    @abstractmethod
    def entropy_torch(self, inputs: Tensor) -> Tensor:
        """Entropy in nats, float32[K], differentiable. Of a Box: the differential entropy."""

    @abstractmethod
    def kl_torch(self, inputs: Tensor, other: Tensor) -> Tensor:
        """KL(inputs || other) in nats, float32[K], differentiable."""

    def apply_mask(self, inputs: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """A copy of the inputs in which forbidden choices have the logit ``MASKED_LOGIT``.

        Raises:
            SpaceError: a mask of another shape, or a row that allows nothing (the row is named).
        """
        allowed = self.check_mask(mask, len(inputs))
        masked = inputs.copy()
        columns = self.mask_columns
        masked[:, columns] = np.where(allowed, masked[:, columns], np.float32(MASKED_LOGIT))
        return masked

    def apply_mask_torch(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """:meth:`apply_mask` for learning; the mask was checked when the row was acted on."""
        import torch

        columns = self.mask_columns
        if len(columns) == inputs.shape[1]:
            return inputs.masked_fill(mask == 0, MASKED_LOGIT)
        full = torch.ones(inputs.shape, dtype=torch.bool, device=inputs.device)
        full[:, torch.from_numpy(columns).to(inputs.device)] = mask != 0
        return inputs.masked_fill(~full, MASKED_LOGIT)

    def check_mask(self, mask: np.ndarray, num_rows: int) -> np.ndarray:
        """The mask as bool [num_rows, mask_width]; raises as :meth:`apply_mask` does."""
        width = sum(self.mask_sizes)
        if mask.shape != (num_rows, width):
            raise SpaceError(f"action_mask has shape {mask.shape}, expected {(num_rows, width)}: one entry per choice")
        allowed = mask != 0
        starts = np.cumsum((0, *self.mask_sizes[:-1]))
        dead = ~np.logical_or.reduceat(allowed, starts, axis=1)
        if dead.any():
            row, part = np.argwhere(dead)[0]
            where = f" in component {part} of the action" if len(self.mask_sizes) > 1 else ""
            raise SpaceError(f"action_mask of row {row} allows no choice{where}: {mask[row].tolist()}")
        return allowed


class ProductDistribution(ActionDistribution):
    """Independent members of a Dict or Tuple space; actions are a dict or tuple in the space's order."""

    def __init__(self, members: dict[str, ActionDistribution] | tuple[ActionDistribution, ...]) -> None:
        self._keys = tuple(members) if isinstance(members, dict) else tuple(range(len(members)))
        self._is_dict = isinstance(members, dict)
        self.members = tuple(members.values()) if isinstance(members, dict) else members
        self.num_outputs = sum(m.num_outputs for m in self.members)
        self.num_free = sum(m.num_free for m in self.members)
        self.noise_kinds = tuple(kind for m in self.members for kind in m.noise_kinds)
        self.mask_sizes = tuple(size for m in self.members for size in m.mask_sizes)
        self._spans: list[tuple[slice, slice]] = []
        self._noise_spans: list[slice] = []
        output, free, noise = 0, self.num_outputs, 0
        for m in self.members:
            self._spans.append((slice(output, output + m.num_outputs), slice(free, free + m.num_free)))
            width = sum(columns for _, columns in m.noise_kinds)
            self._noise_spans.append(slice(noise, noise + width))
            output, free, noise = output + m.num_outputs, free + m.num_free, noise + width

    @property
    def mask_columns(self) -> np.ndarray:
        """int64[mask_width]: the members' columns, moved to where each member's outputs begin."""
        starts = (outputs.start for outputs, _ in self._spans)
        return np.concatenate([m.mask_columns + s for m, s in zip(self.members, starts, strict=True)])

    def _parts(self, inputs: np.ndarray) -> list[np.ndarray]:
        return [
            inputs[:, outputs] if free.start == free.stop else np.concatenate((inputs[:, outputs], inputs[:, free]), 1)
            for outputs, free in self._spans
        ]

    def _parts_torch(self, inputs: Tensor) -> list[Tensor]:
        import torch

        return [
            inputs[:, outputs] if free.start == free.stop else torch.cat((inputs[:, outputs], inputs[:, free]), 1)
            for outputs, free in self._spans
        ]

    def _join(self, parts: list[Any]) -> Tree:
        return dict(zip(self._keys, parts, strict=True)) if self._is_dict else tuple(parts)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> Tree:
        parts = zip(self.members, self._parts(inputs), self._noise_spans, strict=True)
        return self._join([m.sample(x, noise[:, span]) for m, x, span in parts])

    def mode(self, inputs: np.ndarray) -> Tree:
        return self._join([m.mode(x) for m, x in zip(self.members, self._parts(inputs), strict=True)])

    def score(self, inputs: np.ndarray, actions: Tree) -> Score:
        members = zip(self.members, self._parts(inputs), self._keys, strict=True)
        scores = [m.score(x, actions[key]) for m, x, key in members]

        def gradient(d_logp: np.ndarray, d_entropy: float) -> np.ndarray:
            d_inputs = np.empty_like(inputs)
            for score, (outputs, free) in zip(scores, self._spans, strict=True):
                part = score.gradient(d_logp, d_entropy)
                width = outputs.stop - outputs.start
                d_inputs[:, outputs] = part[:, :width]
                d_inputs[:, free] = part[:, width:]
            return d_inputs

        return Score(_total([s.logp for s in scores]), _total([s.entropy for s in scores]), gradient)

    def act(self, inputs: np.ndarray, noise: np.ndarray | None) -> tuple[Tree, np.ndarray]:
        parts = zip(self.members, self._parts(inputs), self._noise_spans, strict=True)
        answers = [m.act(x, None if noise is None else noise[:, span]) for m, x, span in parts]
        return self._join([actions for actions, _ in answers]), _total([logp for _, logp in answers])

    def logp_torch(self, inputs: Tensor, actions: Tree) -> Tensor:
        parts = zip(self.members, self._parts_torch(inputs), self._keys, strict=True)
        return _total([m.logp_torch(x, actions[key]) for m, x, key in parts])

    def entropy_torch(self, inputs: Tensor) -> Tensor:
        return _total([m.entropy_torch(x) for m, x in zip(self.members, self._parts_torch(inputs), strict=True)])

    def kl_torch(self, inputs: Tensor, other: Tensor) -> Tensor:
        pairs = zip(self.members, self._parts_torch(inputs), self._parts_torch(other), strict=True)
        return _total([m.kl_torch(x, y) for m, x, y in pairs])


def _total(parts: list[A]) -> A:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def make_distribution(action_space: gymnasium.Space[Any]) -> ActionDistribution:
    """The distribution for an action space, as in the module's table.

    Raises:
        SpaceError: a space of no fixed size, or one without any action.
    """
    from rlsample.policy.discrete_distributions import Bernoulli, Categorical, MultiCategorical
    from rlsample.policy.gaussian import DiagonalGaussian

    spaces = gymnasium.spaces
    if isinstance(action_space, spaces.Discrete):
        return Categorical(action_space)
    if isinstance(action_space, spaces.MultiDiscrete):
        return MultiCategorical(action_space)
    if isinstance(action_space, spaces.MultiBinary):
        return Bernoulli(action_space)
    if isinstance(action_space, spaces.Box):
        return DiagonalGaussian(action_space)
    if isinstance(action_space, (spaces.Dict, spaces.Tuple)) and len(action_space.spaces) > 0:
        members = action_space.spaces
        if isinstance(members, dict):
            return ProductDistribution({key: make_distribution(space) for key, space in members.items()})
        return ProductDistribution(tuple(make_distribution(space) for space in members))
    raise SpaceError(
        f"no distribution for the action space {action_space}; use Discrete, MultiDiscrete, MultiBinary, Box, or a "
        "non-empty Dict or Tuple of these"
    )
