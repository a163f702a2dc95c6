"""Running mean and variance in float64, merged batch by batch.

Formulas: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
"""

from __future__ import annotations

import numpy as np

__all__ = ["LeafStats", "Moments", "moments_of"]

_EPS = 1e-8
_PENDING_BYTES = 65536


class Moments:
    """Count, mean and sum of squared deviations of rows of D elements."""

    __slots__ = ("m2", "mean", "n")

    def __init__(self, size: int) -> None:
        self.set(0, np.zeros(size), np.zeros(size))

    def set(self, n: int, mean: np.ndarray, m2: np.ndarray) -> None:
        """Copies the values in."""
        self.n = int(n)
        self.mean = np.array(mean, np.float64).reshape(-1)
        self.m2 = np.array(m2, np.float64).reshape(-1)

    def merge(self, n: int, mean: np.ndarray, m2: np.ndarray | None) -> None:
        """Adds n > 0 other rows; m2 None: zero."""
        weight = n / (self.n + n)
        away = mean - self.mean
        self.mean += away * weight
        away *= away
        away *= self.n * weight
        self.m2 += away
        if m2 is not None:
            self.m2 += m2
        self.n += n


class LeafStats:
    """Statistics of one leaf, flat: D elements. The totals normalise; the delta is what came since the last flush.

    One row at a time is the common case of small samplers. Its rows are counted in the totals at once, but wait in
    ``_pending`` for the delta, which nobody reads between syncs.
    """

    def __init__(self, shape: tuple[int, ...], clip: float | None) -> None:
        self.shape = shape
        self.size = int(np.prod(shape, dtype=np.int64))
        self.total, self._delta = Moments(self.size), Moments(self.size)
        self._pending = np.zeros((min(64, max(1, _PENDING_BYTES // max(1, 8 * self.size))), self.size))
        self._num_pending = 0
        self._limits = None if clip is None else (np.array(-clip), np.array(clip))
        self.refresh()

    def delta(self) -> Moments:
        """The delta, with all pending rows merged."""
        if self._num_pending:
            rows, self._num_pending = self._pending[: self._num_pending], 0
            self._delta.merge(len(rows), *moments_of(rows))
        return self._delta

    def std(self) -> np.ndarray:
        """The sample's, float64[D]; ones for fewer than two rows."""
        n = self.total.n
        return np.sqrt(self.total.m2 / (n - 1)) if n > 1 else np.ones(self.size)

    def refresh(self) -> None:
        """To be called after a change of the totals."""
        self._scale = self.std()
        self._scale += _EPS

    def push(self, rows: np.ndarray) -> None:
        """Counts the rows, float64[K, D] with K > 0, in totals and delta."""
        if len(rows) == 1:
            self.total.merge(1, rows[0], None)
            if self._num_pending == len(self._pending):
                self.delta()
            self._pending[self._num_pending] = rows[0]
            self._num_pending += 1
        else:
            mean, m2 = moments_of(rows)
            self.total.merge(len(rows), mean, m2)
            self._delta.merge(len(rows), mean, m2)
        self.refresh()

    def apply(self, leaf: np.ndarray, update: bool) -> np.ndarray:
        """float32 of the leaf's shape [K, ...]."""
        count = len(leaf)
        rows = leaf.astype(np.float64).reshape(count, self.size)
        if update and count:
            self.push(rows)
        out = rows[0] if count == 1 else rows  # numpy is twice as fast where no axis is broadcast
        out -= self.total.mean
        out /= self._scale
        if self._limits is not None:
            np.maximum(out, self._limits[0], out=out)
            np.minimum(out, self._limits[1], out=out)
        return out.astype(np.float32).reshape(leaf.shape)


def moments_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sum of squared deviations of rows [K, D]."""
    mean = np.add.reduce(rows, 0)
    mean /= len(rows)
    inner = rows - mean
    return mean, np.einsum("kd,kd->d", inner, inner)
