"""Whether two batches hold the same, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlsample.sample_batch import NEXT_OBS, SampleBatch
from rlsample.tree import Tree, flatten

__all__ = ["assert_same_batch"]


def assert_same_batch(got: SampleBatch, expected: SampleBatch, columns: Sequence[str] | None = None) -> None:
    """Raises AssertionError unless columns, their structure, dtypes, shapes and bytes are the same, and next_obs,
    however it is derived. The message names the first column that differs.

    Args:
        columns: only these; None: all of both, next_obs, and fragment_lengths.
    """
    if columns is None:
        assert list(got) == list(expected), f"columns {list(got)}, expected {list(expected)}"
        lengths = [None if b.fragment_lengths is None else b.fragment_lengths.tolist() for b in (got, expected)]
        assert lengths[0] == lengths[1], f"fragment_lengths {lengths[0]}, expected {lengths[1]}"
        assert (NEXT_OBS in got) == (NEXT_OBS in expected), "only one has next_obs"
        columns = [*expected, NEXT_OBS] if NEXT_OBS in expected else list(expected)
    assert got.count == expected.count, f"{got.count} rows, expected {expected.count}"
    for name in columns:
        mine, theirs = _leaves(got[name]), _leaves(expected[name])
        assert list(mine) == list(theirs), f"{name}: leaves {list(mine)}, expected {list(theirs)}"
        for path, leaf in theirs.items():
            at, other = f"{name}{path}", mine[path]
            assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape), (
                f"{at}: {other.dtype}{list(other.shape)}, expected {leaf.dtype}{list(leaf.shape)}"
            )
            same = other.tobytes() == leaf.tobytes()
            assert same, f"{at}: {np.array2string(other, threshold=20)}, expected {np.array2string(leaf, threshold=20)}"


def _leaves(tree: Tree) -> dict[str, np.ndarray]:
    return dict(flatten(tree))
