"""Draws in proportion to priorities, in arrays: no Python work per row."""

from __future__ import annotations

import numpy as np

from rlsample.errors import ConfigError

__all__ = ["SumTree"]


class SumTree:
    """Sums and minima over ``capacity`` leaves, in two binary heaps of float64; a leaf's priority is 0 until it is set.

    Each node is computed from its two children whenever one changes: errors do not add up over many updates. Setting or
    drawing K leaves is a few array calls per level of the tree, whatever K is.

    Args:
        capacity: leaves; rounded up to a power of two inside.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"a sum tree needs at least 1 leaf, not {capacity}")
        self.capacity = capacity
        self._depth = (capacity - 1).bit_length()
        self._first = 1 << self._depth  # node of leaf 0; node 1 is the root, 2n and 2n + 1 are the children of n
        self._sums = np.zeros(2 * self._first)
        self._mins = np.full(2 * self._first, np.inf)

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._sums[1])

    @property
    def smallest(self) -> float:
        """The smallest priority above 0; inf if there is none."""
        return float(self._mins[1])

    def get(self, leaves: np.ndarray) -> np.ndarray:
        """Priorities of int64[K] leaves: float64[K], a copy."""
        return self._sums[self._first + leaves]

    def set(self, leaves: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities, [K] of int64[K] leaves. Of a leaf that is there several times the last one counts.

        Raises:
            ConfigError: a priority that is negative or not finite, or a leaf out of range; nothing changed.
        """
        priorities = np.asarray(priorities, np.float64)
        if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
            bad = priorities[~(np.isfinite(priorities) & (priorities >= 0))]
            raise ConfigError(f"priorities must be finite and 0 or more, not {bad[:5].tolist()}")
        if not len(leaves):
            return
        if leaves.min() < 0 or leaves.max() >= self.capacity:
            raise ConfigError(f"leaves go from {leaves.min()} to {leaves.max()}; there are {self.capacity}")
        sums, mins = self._sums, self._mins
        nodes = self._first + leaves
        sums[nodes] = priorities
        settled = sums[nodes]
        mins[nodes] = np.where(settled > 0, settled, np.inf)
        for _ in range(self._depth):
            nodes = nodes >> 1
            if len(nodes) > 1:  # neighbours, such as rows just added, share their parent
                keep = np.ones(len(nodes), bool)
                np.not_equal(nodes[1:], nodes[:-1], out=keep[1:])
                nodes = nodes[keep]
            left = 2 * nodes
            sums[nodes] = sums[left] + sums[left + 1]
            mins[nodes] = np.minimum(mins[left], mins[left + 1])

    def find(self, masses: np.ndarray) -> np.ndarray:
        """The leaves at which the running sum of priorities first exceeds each mass: float64[K] in [0, total) ->
        int64[K].

        Never a leaf of priority 0, also for a mass at or beyond the total.

        Raises:
            ConfigError: all priorities are 0.
        """
        if not self._sums[1] > 0:
            raise ConfigError("cannot draw: all priorities are 0")
        sums = self._sums
        rest = np.array(masses, np.float64)
        nodes = np.ones(len(rest), np.int64)
        for _ in range(self._depth):
            nodes *= 2
            left = sums[nodes]
            right = (rest >= left) & (sums[nodes + 1] > 0)
            rest -= np.where(right, left, 0.0)
            nodes += right
        return nodes - self._first

    def draw(self, num_draws: int, rng: np.random.Generator) -> np.ndarray:
        """Stratified draws, int64[K]: one, uniformly, from each of K equal parts of the total.

        A leaf is expected K * priority / total times and comes less than 2 times more or less often than that, which
        independent draws do not promise (Schaul et al. 2016, arXiv:1511.05952, appendix B.2.1).
        """
        return self.find((np.arange(num_draws) + rng.random(num_draws)) * (self._sums[1] / num_draws))
