"""Rows of experience as columns of equal length.

A batch that came from ``sample()`` stores each observation once. ``next_obs`` is derived: it is the observation of
another row, or one of a few extra observations (the last ones of episodes, and where a fragment was cut).

    batch = SampleBatch({"obs": obs, "rewards": rewards}, NextObs(index, extra))
    batch["rewards"]                      # float32[N]
    batch["next_obs"]                     # gathered now, not kept
    for part in batch.minibatches(64, rng=rng, columns=["obs", "rewards"]):
        loss(part.to_torch())
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlsample import tree
from rlsample.errors import ConfigError, unknown_name
from rlsample.next_obs import NextObs
from rlsample.tree import Tree

__all__ = ["NextObs", "SampleBatch", "Sequences"]

OBS = "obs"
ACTIONS = "actions"
REWARDS = "rewards"
TERMINATED = "terminated"
TRUNCATED = "truncated"
NEXT_OBS = "next_obs"
ACTION_LOGP = "action_logp"
VALUES = "values"
ADVANTAGES = "advantages"
VALUE_TARGETS = "value_targets"
EPS_ID = "eps_id"
T = "t"
ENV_ID = "env_id"
AGENT_ID = "agent_id"
FRAGMENT_ID = "fragment_id"
POLICY_VERSION = "policy_version"


class Sequences(NamedTuple):
    """Consecutive rows of one episode, for recurrent policies: rows ``starts[i] : starts[i] + lengths[i]``.

    Attributes:
        starts: int64[S], ascending; together the sequences hold every row once.
        lengths: int64[S], each in ``[1, max_len]``.
    """

    starts: np.ndarray
    lengths: np.ndarray


class SampleBatch:
    """N rows as named columns; a column is an array [N, ...] or a Dict/Tuple tree of such arrays.

    It holds the arrays it was given, without a copy. Iteration gives the names, ``len`` the rows.

    Attributes:
        count: N.
        next_obs_source: how ``next_obs`` is derived; None where it is not (then it may be a stored column).
        fragment_lengths: int64[F], lengths of consecutive lane fragments, all rows of lane 0 first; sum N. None:
            unknown. Kept by :meth:`concat` and :meth:`copy`, dropped where rows are left out or reordered.

    Raises:
        ConfigError: columns of different lengths, or something that is no array with a first axis (column named).
    """

    next_obs_source: NextObs | None
    fragment_lengths: np.ndarray | None

    def __init__(
        self,
        columns: Mapping[str, Tree],
        next_obs: NextObs | None = None,
        fragment_lengths: np.ndarray | None = None,
    ) -> None:
        self._columns: dict[str, Tree] = dict(columns)
        self.count: int = 0
        if self._columns:
            self.count = _length(*next(iter(self._columns.items())))
        for name, column in self._columns.items():
            self._check(name, column)
        if next_obs is not None:
            next_obs.check(self._columns.get(OBS), self.count)
        self.next_obs_source = next_obs
        if fragment_lengths is not None:
            fragment_lengths = np.asarray(fragment_lengths, np.int64)
            if fragment_lengths.ndim != 1 or fragment_lengths.sum() != self.count or (fragment_lengths < 0).any():
                raise ConfigError(f"fragment_lengths {fragment_lengths.tolist()} do not add up to {self.count} rows")
        self.fragment_lengths = fragment_lengths

    def _check(self, name: str, column: Tree) -> None:
        if type(column) is np.ndarray and column.shape[:1] == (self.count,):
            return
        _length(name, column)
        for path, leaf in tree.flatten(column):
            if _length(name, leaf) != self.count:
                first = next(iter(self._columns))
                where = f"{name!r} (at {path})" if path else repr(name)
                raise ConfigError(f"column {where} has {len(leaf)} rows, column {first!r} has {self.count}")

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def keys(self) -> KeysView[str]:
        """Names of the stored columns. A derived ``next_obs`` is not among them, though ``in`` finds it."""
        return self._columns.keys()

    def items(self) -> ItemsView[str, Tree]:
        """``(name, column)`` of the stored columns."""
        return self._columns.items()

    def __contains__(self, name: object) -> bool:
        return name in self._columns or (name == NEXT_OBS and self.next_obs_source is not None)

    def __getitem__(self, name: str) -> Tree:
        """The column itself, not a copy; a derived ``next_obs`` is gathered at each access."""
        column = self._columns.get(name)
        if column is not None:
            return column
        if name == NEXT_OBS and self.next_obs_source is not None:
            return self.next_obs_source.gather(self._columns.get(OBS))
        if not isinstance(name, str):
            raise KeyError(f"a column name is a str, got {name!r}; rows are taken by slice() or select()")
        raise KeyError(str(unknown_name("column", name, self._columns)))

    def get(self, name: str, default: Any = None) -> Any:
        """The column, or ``default`` where there is none."""
        found = name in self
        return self[name] if found else default

    def __setitem__(self, name: str, column: Tree) -> None:
        """Adds or replaces a column; the array is held, not copied.

        Replacing ``obs`` leaves ``next_obs`` as it was: the old observations stay its source.
        """
        if not self._columns:
            self.count = _length(name, column)
        self._check(name, column)
        nxt = self.next_obs_source
        if name == OBS and nxt is not None and nxt.source is None and column is not self._columns[OBS]:
            self.next_obs_source = NextObs(nxt.index, nxt.extra, self._columns[OBS])
        self._columns[name] = column

    @property
    def nbytes(self) -> int:
        """Bytes of the columns and of what ``next_obs`` needs beside them; a ``source`` belongs to another batch."""
        total = sum(leaf.nbytes for column in self._columns.values() for leaf in tree.leaves(column))
        if self.next_obs_source is not None:
            nxt = self.next_obs_source
            total += nxt.index.nbytes + sum(leaf.nbytes for leaf in tree.leaves(nxt.extra))
        return total

    def __repr__(self) -> str:
        shown = [
            f"{name}{path if not path or path[0] == '[' else '.' + path}: {leaf.dtype}{list(leaf.shape)}"
            for name, column in self._columns.items()
            for path, leaf in tree.flatten(column)
        ]
        if NEXT_OBS in self and NEXT_OBS not in self._columns:
            shown.append("next_obs: derived")
        return f"SampleBatch({self.count} rows; {', '.join(shown)})"

    def bootstrap(self, values: np.ndarray, extra_values: np.ndarray) -> np.ndarray:
        """The value of each row's next observation: float32[N], fresh.

        Args:
            values: [N], of the rows' own observations.
            extra_values: [E], of ``next_obs_source.extra``.

        Raises:
            ConfigError: wrong lengths, or next observations that are not rows of this batch (a slice through a
                fragment, a selection): compute values of ``batch["next_obs"]`` then.
        """
        nxt = self.next_obs_source
        if nxt is None or nxt.source is not None:
            why = "no derived next_obs" if nxt is None else "next observations in another batch"
            raise ConfigError(f'bootstrap: this batch has {why}; compute the values of batch["next_obs"] instead')
        num_extra = tree.num_rows(nxt.extra)
        if len(values) != self.count or len(extra_values) != num_extra:
            got = f"{len(values)} values and {len(extra_values)} extra_values"
            raise ConfigError(f"bootstrap: got {got} for {self.count} rows and {num_extra} extra observations")
        both = np.concatenate([values, extra_values[::-1]], dtype=np.float32, casting="unsafe")
        return both[nxt.index]  # -1 - e counts from the end, where the reversed extra values are

    def slice(self, start: int, stop: int) -> SampleBatch:
        """Rows ``start:stop`` (as in a Python slice) as views. ``next_obs`` still reaches past the end."""
        start, stop, _ = slice(start, stop).indices(self.count)
        stop = max(start, stop)
        if stop - start == self.count:
            return SampleBatch(self._columns, self.next_obs_source, self.fragment_lengths)
        nxt = self.next_obs_source
        return SampleBatch(
            {name: tree.gather(column, slice(start, stop)) for name, column in self._columns.items()},
            None if nxt is None else nxt.slice(start, stop, self._columns.get(OBS)),
        )

    def select(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> SampleBatch:
        """The rows of an index array (or a bool mask [N]), in its order, copied.

        Args:
            columns: copy these only; may name ``next_obs``, which then becomes a stored column. None: all stored
                columns, and ``next_obs`` stays derived (it refers to this batch's observations and keeps them alive).
        """
        rows = np.asarray(rows)
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64, copy=False)
        nxt = None
        if self.next_obs_source is not None and (columns is None or NEXT_OBS in columns):
            nxt = self.next_obs_source.select(rows, self._columns.get(OBS))
        if columns is None:
            return SampleBatch({name: tree.gather(column, rows) for name, column in self._columns.items()}, nxt)
        taken = {}
        for name in columns:
            derived = name == NEXT_OBS and name not in self._columns and nxt is not None
            taken[name] = nxt.gather(None) if derived and nxt else tree.gather(self[name], rows)
        return SampleBatch(taken)

    def shuffle(self, rng: np.random.Generator) -> SampleBatch:
        """A new batch with the rows in random order, the same for every column."""
        return self.select(rng.permutation(self.count))

    def minibatches(
        self,
        size: int,
        rng: np.random.Generator | None = None,
        drop_last: bool = False,
        columns: Sequence[str] | None = None,
    ) -> Iterator[SampleBatch]:
        """One epoch: every row once, ``size`` rows at a time.

        Args:
            size: rows of a minibatch. More than there are: one minibatch of all rows, also with ``drop_last``.
            rng: draws the order; without it rows come in order, as views.
            drop_last: leave out a last minibatch that is smaller. Default: it is given out too.
            columns: as in :meth:`select`: only these are gathered.
        """
        if size < 1:
            raise ConfigError(f"minibatch size {size}: must be at least 1")
        order = None if rng is None else rng.permutation(self.count)
        return self._minibatches(min(size, max(self.count, 1)), order, drop_last, columns)

    def _minibatches(
        self, size: int, order: np.ndarray | None, drop_last: bool, columns: Sequence[str] | None
    ) -> Iterator[SampleBatch]:
        end = self.count - self.count % size if drop_last else self.count
        for start in range(0, end, size):
            stop = min(start + size, end)
            if order is not None:
                yield self.select(order[start:stop], columns)
            else:
                part = self.slice(start, stop)
                yield part if columns is None else SampleBatch({name: part[name] for name in columns})

    def split_by_episode(self) -> list[SampleBatch]:
        """Views of the runs of rows of one episode (same eps_id and, where stored, fragment_id, env_id, agent_id)."""
        starts = self._run_starts((EPS_ID, FRAGMENT_ID, ENV_ID, AGENT_ID))
        ends = [*starts[1:].tolist(), self.count]
        return [self.slice(start, end) for start, end in zip(starts.tolist(), ends, strict=True)] if self.count else []

    def _run_starts(self, names: Sequence[str], consecutive: str | None = None) -> np.ndarray:
        """int64: rows where a column of ``names`` differs from the row before, or ``consecutive`` is not 1 more."""
        if EPS_ID not in self._columns:
            raise ConfigError(f"episodes need the column 'eps_id'; this batch has {', '.join(self._columns)}")
        if not self.count:
            return np.zeros(0, np.int64)
        new = np.zeros(self.count, bool)
        new[0] = True
        for name in names:
            if name in self._columns:
                new[1:] |= self._columns[name][1:] != self._columns[name][:-1]
        if consecutive in self._columns:
            new[1:] |= self._columns[consecutive][1:] != self._columns[consecutive][:-1] + 1
        return np.flatnonzero(new)

    def sequences(self, max_len: int) -> Sequences:
        """Cuts the rows where episode, agent, env or fragment changes, where ``t`` jumps, and after ``max_len`` rows.

        Two fragments of one episode are never joined: other weights, or a gap, may lie between them.
        """
        if max_len < 1:
            raise ConfigError(f"max_len {max_len}: must be at least 1")
        runs = self._run_starts((EPS_ID, FRAGMENT_ID, ENV_ID, AGENT_ID), consecutive=T)
        lengths = np.diff(runs, append=self.count)
        pieces = -(-lengths // max_len)
        nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(runs, pieces) + nth * max_len
        return Sequences(starts, np.minimum(max_len, np.repeat(runs + lengths, pieces) - starts))

    def time_major(
        self, T: int | None = None, pad: bool = False, columns: Sequence[str] | None = None
    ) -> dict[str, Tree]:
        """The columns as [T, B, ...], B lane fragments side by side.

        Views, where all fragments have T rows. With ``pad`` shorter ones are filled up with zeros (a copy), and the
        dict has a bool ``mask`` [T, B] that is true where there is a row.

        Args:
            T: steps; None: the longest fragment.
            columns: only these; may name ``next_obs``. None: all stored columns.

        Raises:
            ConfigError: no ``fragment_lengths``; lengths other than T without ``pad``; a fragment longer than T.
        """
        lengths = self.fragment_lengths
        if lengths is None:
            raise ConfigError("time_major needs fragment_lengths; shuffle, select and slice drop them: call it before")
        num_steps = int(lengths.max(initial=0)) if T is None else T
        equal = bool((lengths == num_steps).all())
        if (not equal and not pad) or (lengths > num_steps).any():
            fix = "use pad=True" if (lengths <= num_steps).all() else f"use T >= {lengths.max()}"
            found = ", ".join(map(str, np.unique(lengths).tolist()))
            raise ConfigError(f"time_major: fragments of length {found} do not all have T={num_steps} rows; {fix}")
        mask = np.arange(num_steps) < lengths[:, None]

        def arrange(leaf: np.ndarray) -> np.ndarray:
            if equal:
                return leaf.reshape(len(lengths), num_steps, *leaf.shape[1:]).swapaxes(0, 1)
            out = np.zeros((len(lengths), num_steps, *leaf.shape[1:]), leaf.dtype)
            out[mask] = leaf
            return out.swapaxes(0, 1)

        names = list(self._columns) if columns is None else columns
        result = {name: tree.map_tree(arrange, self[name]) for name in names}
        if pad and "mask" in result:
            raise ConfigError("time_major: the batch has a column 'mask' of its own; leave it out by columns=[...]")
        if pad:
            result["mask"] = mask.T
        return result

    def to_torch(self, columns: Sequence[str] | None = None) -> dict[str, Tree]:
        """The columns as torch tensors that share memory with the arrays.

        Args:
            columns: only these; may name ``next_obs``. None: all stored columns.

        Copied are only arrays that torch cannot share: read-only ones, negative strides, foreign byte order.
        """
        from rlsample.torch_view import as_tensor

        names = list(self._columns) if columns is None else columns
        return {name: tree.map_tree(as_tensor, self[name]) for name in names}

    def copy(self) -> SampleBatch:
        """A batch that shares no memory with this one, nor with a batch this one was sliced from."""
        columns = {name: tree.map_tree(np.copy, column) for name, column in self._columns.items()}
        lengths = self.fragment_lengths
        return SampleBatch(columns, self._detached_next_obs(), None if lengths is None else lengths.copy())

    def _detached_next_obs(self) -> NextObs | None:
        nxt = self.next_obs_source
        return None if nxt is None else nxt.detach(self._columns.get(OBS))

    def __reduce__(self) -> tuple[Any, ...]:
        # A slice must not take its parent's observations along.
        return SampleBatch, (self._columns, self._detached_next_obs(), self.fragment_lengths)

    @staticmethod
    def concat(batches: Sequence[SampleBatch]) -> SampleBatch:
        """The rows of all batches, one after another; each column is copied once.

        ``next_obs`` stays derived if the parts hold their next observations themselves or share one source; else it
        becomes a stored column; it is absent if a part has none. ``fragment_lengths`` are kept if all parts have them.

        Raises:
            ConfigError: no batches, or batches whose columns differ (named).
        """
        if not batches:
            raise ConfigError("concat of no batches: the columns are unknown")
        names = [name for name in batches[0] if name != NEXT_OBS]
        for i, batch in enumerate(batches):
            odd = (set(batch) ^ set(names)) - {NEXT_OBS}
            if odd:
                raise ConfigError(f"concat: batches 0 and {i} differ in the columns {', '.join(sorted(odd))}")
        columns = {name: tree.concat([batch[name] for batch in batches]) for name in names}
        sources = [b.next_obs_source for b in batches if b.next_obs_source is not None and NEXT_OBS not in b._columns]
        nxt = NextObs.concat(sources) if len(sources) == len(batches) else None
        if nxt is None and all(NEXT_OBS in batch for batch in batches):
            columns[NEXT_OBS] = tree.concat([batch[NEXT_OBS] for batch in batches])
        lengths = [b.fragment_lengths for b in batches if b.fragment_lengths is not None]
        return SampleBatch(columns, nxt, np.concatenate(lengths) if len(lengths) == len(batches) else None)


def _length(name: str, column: Tree) -> int:
    """Rows of the first leaf."""
    leaf = next((leaf for _, leaf in tree.flatten(column)), None)
    if not isinstance(leaf, np.ndarray):
        got = "an empty tree" if leaf is None else type(leaf).__name__
        raise ConfigError(f"column {name!r}: expected an array, or a dict or tuple of arrays, got {got}")
    if leaf.ndim == 0:
        raise ConfigError(f"column {name!r}: expected an array with a first axis of rows, got a 0-d {leaf.dtype}")
    return len(leaf)
