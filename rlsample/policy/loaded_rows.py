"""Rows that lie on a device, ready for a loss: what a loader makes of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlsample.tree import Tree, map_tree

if TYPE_CHECKING:
    import torch

__all__ = ["LoadedRows"]


@dataclass(frozen=True)
class LoadedRows(Mapping[str, Tree]):
    """n rows as columns of tensors on one device. ``rows["obs"]`` is a view [n, ...], and so are the others.

    The tensors belong to a loader and are overwritten once the loss has been used: keep no reference.

    Attributes:
        count: n.
        columns: name -> tensor or tree of tensors [n, ...]; ``obs`` has e rows more where ``next_index`` is there.
        next_index: int64[n]: where each row's next observation is in :attr:`all_obs`; None where rows are loaded alone.
            ``next_index[i] == i + 1 < n`` where row i + 1 continues row i, and nowhere else.
    """

    count: int
    columns: Mapping[str, Any]
    next_index: torch.Tensor | None = None

    @property
    def all_obs(self) -> Tree:
        """The rows' observations and then the e extra ones (an episode's last, the one after a cut): [n + e, ...]."""
        return self.columns["obs"]

    def __getitem__(self, name: str) -> Tree:
        column = self.columns[name]
        if name != "obs" or self.next_index is None:
            return column
        return map_tree(lambda leaf: leaf[: self.count], column)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        """The number of columns, as of any mapping."""
        return len(self.columns)
