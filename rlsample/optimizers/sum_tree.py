"""Draws in proportion to priorities, in arrays: no Python work per row."""

from __future__ import annotations

import numpy as np

from rlsample.errors import ConfigError

__all__ = ["SumTree"]

_WIDTH_BITS = 4
_WIDTH = 1 << _WIDTH_BITS  # children of a node: what costs is the number of array calls, a round of them per level


class SumTree:
    """Sums and minima over ``capacity`` leaves, in a tree of float64 arrays; a leaf's priority is 0 until it is set.

    Each node is computed from its children whenever one changes: errors do not add up over many updates. Setting or
    drawing K leaves is a few array calls per level of the tree (5 for a million leaves), whatever K is.

    Args:
        capacity: leaves.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"a sum tree needs at least 1 leaf, not {capacity}")
        self.capacity = capacity
        groups = -(-capacity // _WIDTH)
        shapes = [groups]
        while groups > 1:
            groups = -(-groups // _WIDTH)
            shapes.append(groups)
        # Level 0 has the leaves, [groups, 16]; node g of the level above sums its group g. The last one is one group.
        self._sums = [np.zeros((groups, _WIDTH)) for groups in shapes]
        self._mins = [np.full((groups, _WIDTH), np.inf) for groups in shapes]

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._sums[-1].sum())

    @property
    def smallest(self) -> float:
        """The smallest priority above 0; inf if there is none."""
        return float(self._mins[-1].min())

    def get(self, leaves: np.ndarray) -> np.ndarray:
        """Priorities of int64[K] leaves: float64[K], a copy."""
        return self._sums[0].ravel()[leaves]

    def set(self, leaves: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities, [K] of int64[K] leaves. Of a leaf that is there several times the last one counts.

        Raises:
            ConfigError: a priority that is negative or not finite, or a leaf out of range; nothing changed.
        """
        priorities = np.asarray(priorities, np.float64)
        if not len(leaves):
            return
        if not (priorities.min() >= 0 and priorities.max() < np.inf):
            bad = priorities[~(np.isfinite(priorities) & (priorities >= 0))]
            raise ConfigError(f"priorities must be finite and 0 or more, not {bad[:5].tolist()}")
        if leaves.min() < 0 or leaves.max() >= self.capacity:
            raise ConfigError(f"leaves go from {leaves.min()} to {leaves.max()}; there are {self.capacity}")
        sums = self._sums[0].ravel()
        sums[leaves] = priorities
        settled = sums[leaves]
        self._mins[0].ravel()[leaves] = np.where(settled > 0, settled, np.inf)
        nodes = leaves
        for level in range(1, len(self._sums)):
            nodes = nodes >> _WIDTH_BITS
            if len(nodes) > 1:  # neighbours, such as rows just added, share their parent
                is_first = np.ones(len(nodes), bool)
                np.not_equal(nodes[1:], nodes[:-1], out=is_first[1:])
                nodes = nodes[is_first]
            self._sums[level].ravel()[nodes] = self._sums[level - 1][nodes].sum(1)
            self._mins[level].ravel()[nodes] = self._mins[level - 1][nodes].min(1)

    def find(self, masses: np.ndarray) -> np.ndarray:
        """The leaves at which the running sum of priorities first exceeds each mass: float64[K] in [0, total) ->
        int64[K].

        Never a leaf of priority 0, also for a mass at or beyond the total.

        Raises:
            ConfigError: all priorities are 0.
        """
        if not self._mins[-1].min() < np.inf:
            raise ConfigError("cannot draw: all priorities are 0")
        rest = np.array(masses, np.float64)
        nodes = np.zeros(len(rest), np.int64)
        rows = np.arange(len(rest))
        for level in reversed(self._sums):
            children = level[nodes]
            running = children.cumsum(1)
            # Rounding may leave a mass at or beyond the last sum: the last child with a priority is meant then.
            mass = np.minimum(rest, np.nextafter(running[:, -1], 0))
            chosen = (running > mass[:, None]).argmax(1)
            rest = rest - (running[rows, chosen] - children[rows, chosen])
            nodes = nodes * _WIDTH + chosen
        return nodes

    def draw(self, num_draws: int, rng: np.random.Generator) -> np.ndarray:
        """Stratified draws, int64[K]: one, uniformly, from each of K equal parts of the total.

        A leaf is expected K * priority / total times and comes less than 2 times more or less often than that, which
        independent draws do not promise (Schaul et al. 2016, arXiv:1511.05952, appendix B.2.1).
        """
        return self.find((np.arange(num_draws) + rng.random(num_draws)) * (self.total / num_draws))
