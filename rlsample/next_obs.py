"""The derived column ``next_obs``: each observation is stored once, and rows point to the one that follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlsample import tree
from rlsample.errors import ConfigError
from rlsample.tree import Tree

__all__ = ["NextObs"]


@dataclass(frozen=True)
class NextObs:
    """Where each row's next observation is.

    Attributes:
        index: int64[N]. ``i >= 0``: row i of ``source``; ``i < 0``: row ``-1 - i`` of ``extra``.
        extra: tree [E, ...], observations that are no row's own.
        source: tree [M, ...], the observations that ``index`` counts in; None: the batch's own ``obs`` column.
    """

    index: np.ndarray
    extra: Tree
    source: Tree = None

    def check(self, own_obs: Tree, num_rows: int) -> None:
        """Raises ConfigError unless there is one index per row and each points at an observation."""
        if len(self.index) != num_rows:
            raise ConfigError(f"NextObs.index has {len(self.index)} entries for {num_rows} rows")
        source = own_obs if self.source is None else self.source
        if source is None:
            raise ConfigError("NextObs counts in the column 'obs', which is missing; add it or give NextObs a source")
        if num_rows:
            low, high = self.index.min(), self.index.max()
            num_source, num_extra = tree.num_rows(source), tree.num_rows(self.extra)
            if low < -num_extra or high >= num_source:
                raise ConfigError(
                    f"NextObs.index goes from {low} to {high}, but there are {num_extra} extra observations "
                    f"(-1 to {-num_extra}) and {num_source} in the source (0 to {num_source - 1})"
                )

    def gather(self, own_obs: Tree) -> Tree:
        """The N next observations: tree [N, ...], a copy. ``own_obs`` is read where ``source`` is None."""
        source = own_obs if self.source is None else self.source
        from_extra = np.flatnonzero(self.index < 0)
        if not len(from_extra):
            return tree.gather(source, self.index)
        extra_rows = -1 - self.index[from_extra]
        if len(from_extra) == len(self.index):
            return tree.gather(self.extra, extra_rows)
        out = tree.gather(source, np.maximum(self.index, 0))
        tree.assign(out, from_extra, tree.gather(self.extra, extra_rows))
        return out

    def slice(self, start: int, stop: int, own_obs: Tree) -> NextObs:
        """For rows ``start:stop``. Counts in the slice's own rows where none of them points outside the slice."""
        index = self.index[start:stop]
        if self.source is not None:
            return NextObs(index, self.extra, self.source)
        inside = index >= start
        inside &= index < stop
        inside |= index < 0
        if inside.all():
            return NextObs(np.where(index < 0, index, index - start), self.extra)
        return NextObs(index, self.extra, own_obs)

    def select(self, rows: np.ndarray, own_obs: Tree) -> NextObs:
        """For the rows of an index array. Observations are not copied: the result refers to this batch's."""
        return NextObs(self.index[rows], self.extra, own_obs if self.source is None else self.source)

    def detach(self, own_obs: Tree) -> NextObs:
        """A copy with what its rows need and nothing else, without a ``source``."""
        if self.source is not None:
            return NextObs(-1 - np.arange(len(self.index), dtype=np.int64), self.gather(own_obs))
        index = self.index.copy()
        from_extra = np.flatnonzero(index < 0)
        kept, position = np.unique(-1 - index[from_extra], return_inverse=True)
        index[from_extra] = -1 - position.reshape(-1)
        return NextObs(index, tree.gather(self.extra, kept))

    @staticmethod
    def concat(parts: Sequence[NextObs]) -> NextObs | None:
        """For the concatenation of the parts' rows, without touching an observation that is a row's own.

        None: not possible, because the parts count in several sources.
        """
        first = parts[0]
        if all(p.source is first.source and p.extra is first.extra for p in parts) and first.source is not None:
            return NextObs(np.concatenate([p.index for p in parts]), first.extra, first.source)
        if any(p.source is not None for p in parts):
            return None
        offsets: dict[int, int] = {}  # identity of an extra tree -> its first row in the result
        extras, num_extra, num_rows, index = [], 0, 0, []
        for p in parts:
            if id(p.extra) not in offsets:
                offsets[id(p.extra)] = num_extra
                extras.append(p.extra)
                num_extra += tree.num_rows(p.extra)
            index.append(np.where(p.index < 0, p.index - offsets[id(p.extra)], p.index + num_rows))
            num_rows += len(p.index)
        return NextObs(np.concatenate(index), extras[0] if len(extras) == 1 else tree.concat(extras))
