"""Where a loader puts rows: one piece of host memory, filled fragment by fragment, and its copy on a device.

Every column is a stretch of that piece, aligned and packed for the rows at hand, so that one copy takes all columns to
the device. A column keeps its dtype: uint8 images travel as uint8.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlsample.errors import ConfigError
from rlsample.policy.loaded_rows import LoadedRows
from rlsample.sample_batch import SampleBatch
from rlsample.tree import Tree, flatten, gather, map_tree, num_rows

__all__ = ["HostRows", "Layout", "Memory", "MinibatchIndex", "SharedMemory", "Span", "loaded_rows", "open_shared"]

_ALIGNMENT = 64
_SPARE = 1.125  # room for batches that grow a little, so that memory is rarely allocated again


@dataclass(frozen=True)
class Span:
    """An array inside the piece of memory: offset in bytes, shape and numpy dtype name."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """Where everything is. Can be pickled.

    Attributes:
        count: rows n.
        columns: name -> tree of Span [n, ...]; ``obs`` has the e extra observations after its n rows.
        next_index: Span of int64[n], into the n + e observations; None where rows are loaded alone.
        num_bytes: of all together.
    """

    count: int
    columns: dict[str, Tree]
    next_index: Span | None
    num_bytes: int


@dataclass(frozen=True)
class MinibatchIndex:
    """Rows of a minibatch, int64[n]; of whole fragments also the observations [n + e] and ``next_index`` into these."""

    rows: np.ndarray
    obs: np.ndarray | None = None
    next_index: np.ndarray | None = None


class Memory:
    """Host memory that grows.

    Args:
        pinned: page-locked, which a CUDA device can copy from while the CPU goes on.

    Attributes:
        array: uint8[capacity].
        tensor: the same memory.
        version: +1 with each allocation.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self.version = 0
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.array = self.tensor.numpy()

    def reserve(self, num_bytes: int) -> None:
        """Makes room; what was there is lost where that takes new memory."""
        if num_bytes > len(self.array):
            self.version += 1
            self.tensor = torch.empty(int(num_bytes * _SPARE), dtype=torch.uint8, pin_memory=self._pinned)
            self.array = self.tensor.numpy()

    def close(self) -> None:
        """Nothing to do: the memory goes with its last view."""


class SharedMemory(Memory):
    """Memory that other processes can open while this one holds it: anonymous, so nothing is left after a kill.

    Attributes:
        address: what :func:`open_shared` takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fd = -1
        self.address = ("", 0)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes <= len(self.array):
            return
        self.close()
        size = int(num_bytes * _SPARE)
        self.version += 1
        self._fd = os.memfd_create("rlsample-rows", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.array = np.frombuffer(mmap.mmap(self._fd, size), np.uint8)
        self.tensor = torch.from_numpy(self.array)
        self.address = (f"/proc/{os.getpid()}/fd/{self._fd}", size)

    def close(self) -> None:
        """Lets go of the memory; who has opened it keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.tensor = torch.empty(0, dtype=torch.uint8)
            self.array = self.tensor.numpy()


def open_shared(address: tuple[str, int]) -> Tensor:
    """Another process's :class:`SharedMemory`, as uint8[size]."""
    path, size = address
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(fd, size), np.uint8))
    finally:
        os.close(fd)


class HostRows:
    """Host memory for the rows that one device gets at once.

    Args:
        columns: names of what is copied; ``next_obs`` may be one of them.
        whole_fragments: also take each row's next observation, so that a loss can value it.
        memory: where to.

    Attributes:
        layout: of what was filled last.
        fragments: int64[F, 2]: first row and length of each fragment in it.
        bytes_filled: bytes copied so far.
    """

    def __init__(self, columns: Sequence[str], whole_fragments: bool, memory: Memory) -> None:
        self.memory = memory
        self.layout = Layout(0, {}, None, 0)
        self.fragments = np.zeros((0, 2), np.int64)
        self.bytes_filled = 0
        self._columns = tuple(columns)
        self._whole_fragments = whole_fragments

    def fill(self, batches: Sequence[SampleBatch]) -> None:
        """Copies the batches' rows, one after another, each array once.

        Raises:
            ConfigError: no rows, a missing column, or one whose dtype or shape differs between batches (named).
        """
        batches = [batch for batch in batches if batch.count]
        if not batches:
            raise ConfigError("there are no rows to load")
        count = sum(batch.count for batch in batches)
        nexts = [_next_observations(batch) for batch in batches] if self._whole_fragments else []
        num_extra = sum(num_rows(extra) for _, extra in nexts)
        self.layout = self._plan(batches[0], count, num_extra)
        self.memory.reserve(self.layout.num_bytes)
        array = self.memory.array
        views = {name: map_tree(lambda span: _view(array, span), spans) for name, spans in self.layout.columns.items()}
        for name, view in views.items():
            start = 0
            for batch in batches:
                self._copy(name, view, start, self._column(batch, name))
                start += batch.count
        if self.layout.next_index is not None:
            self._fill_next(batches, nexts, views["obs"], _view(array, self.layout.next_index), count)
        self.bytes_filled += self.layout.num_bytes
        self.fragments = _fragments(batches)

    def _plan(self, sample: SampleBatch, count: int, num_extra: int) -> Layout:
        offset = 0

        def place(leaf: np.ndarray, rows: int) -> Span:
            nonlocal offset
            span = Span(offset, (rows, *leaf.shape[1:]), leaf.dtype.str)
            size = rows * leaf.itemsize * int(np.prod(leaf.shape[1:], dtype=np.int64))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
            return span

        columns = {}
        for name in self._columns:
            rows = count + num_extra if name == "obs" else count
            columns[name] = map_tree(lambda leaf, rows=rows: place(leaf, rows), self._column(sample, name))
        index = place(np.zeros(1, np.int64), count) if self._whole_fragments else None
        return Layout(count, columns, index, offset)

    def _column(self, batch: SampleBatch, name: str) -> Tree:
        if name not in batch:
            raise ConfigError(f"the loss takes the column {name!r}; the batch has {', '.join(batch)}")
        return batch[name]

    def _copy(self, name: str, view: Tree, start: int, column: Tree) -> None:
        for (path, target), (_, leaf) in zip(flatten(view), flatten(column), strict=True):
            if leaf.dtype != target.dtype or leaf.shape[1:] != target.shape[1:]:
                where = f"{name!r} (at {path})" if path else repr(name)
                forms = [f"{x.dtype}{list(x.shape[1:])}" for x in (leaf, target)]
                raise ConfigError(f"column {where} is {forms[0]} per row in one batch and {forms[1]} in another")
            np.copyto(target[start : start + len(leaf)], leaf)

    def _fill_next(
        self, batches: list[SampleBatch], nexts: list[tuple[np.ndarray, Tree]], obs: Tree, index: np.ndarray, count: int
    ) -> None:
        start, extra_start = 0, count
        for batch, (next_index, extra) in zip(batches, nexts, strict=True):
            stop = start + batch.count
            index[start:stop] = np.where(next_index < 0, extra_start - 1 - next_index, start + next_index)
            self._copy("obs", obs, extra_start, extra)
            start, extra_start = stop, extra_start + num_rows(extra)

    def minibatch(self, fragments: np.ndarray) -> MinibatchIndex:
        """The rows of some fragments (int64, indices into :attr:`fragments`), and the observations they need."""
        first, lengths = self.fragments[fragments].T
        rows = np.repeat(first - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        assert self.layout.next_index is not None
        targets = _view(self.memory.array, self.layout.next_index)[rows]
        (_, obs), *_ = flatten(self.layout.columns["obs"])
        position = np.full(obs.shape[0], -1)
        position[rows] = np.arange(len(rows))
        inside = position[targets]
        outside = np.flatnonzero(inside < 0)
        inside[outside] = len(rows) + np.arange(len(outside))
        return MinibatchIndex(rows, np.concatenate([rows, targets[outside]]), inside)


def loaded_rows(memory: Tensor, layout: Layout, index: MinibatchIndex | None = None) -> LoadedRows:
    """The rows as tensors: views of ``memory`` (uint8, on any device), or, with an index, those rows gathered.

    Gathering copies: ``index.rows`` and the like are taken to the memory's device.
    """
    columns = {name: map_tree(lambda span: _tensor(memory, span), spans) for name, spans in layout.columns.items()}
    next_index = None if layout.next_index is None else _tensor(memory, layout.next_index)
    if index is None:
        return LoadedRows(layout.count, columns, next_index)
    rows = torch.from_numpy(index.rows).to(memory.device, non_blocking=True)
    obs = rows if index.obs is None else torch.from_numpy(index.obs).to(memory.device, non_blocking=True)
    taken = {
        name: map_tree(lambda leaf, at=obs if name == "obs" else rows: leaf.index_select(0, at), column)
        for name, column in columns.items()
    }
    if index.next_index is not None:
        next_index = torch.from_numpy(index.next_index).to(memory.device, non_blocking=True)
    return LoadedRows(len(index.rows), taken, next_index)


def _view(array: np.ndarray, span: Span) -> np.ndarray:
    return np.ndarray(span.shape, span.dtype, buffer=array.data, offset=span.offset)


def _tensor(memory: Tensor, span: Span) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, span.dtype)).dtype
    size = int(np.prod(span.shape, dtype=np.int64)) * np.dtype(span.dtype).itemsize
    return memory[span.offset : span.offset + size].view(dtype).view(span.shape)


def _next_observations(batch: SampleBatch) -> tuple[np.ndarray, Tree]:
    """``(index, extra)`` as in NextObs, counting in the batch's own rows; ``extra`` holds what is needed, no more."""
    source = batch.next_obs_source
    if source is not None and source.source is None:
        index = source.index.copy()
        from_extra = np.flatnonzero(index < 0)
        used, position = np.unique(-1 - index[from_extra], return_inverse=True)
        index[from_extra] = -1 - position.reshape(-1)
        whole = len(used) == num_rows(source.extra)
        return index, source.extra if whole else gather(source.extra, used)
    if "next_obs" not in batch:
        raise ConfigError("the loss takes whole fragments with next observations; the batch has " + ", ".join(batch))
    starts, lengths = batch.sequences(batch.count)
    ends = starts + lengths - 1
    index = np.arange(1, batch.count + 1)
    index[ends] = -1 - np.arange(len(ends))
    return index, gather(batch["next_obs"], ends)


def _fragments(batches: Sequence[SampleBatch]) -> np.ndarray:
    parts = [[b.count] if b.fragment_lengths is None else b.fragment_lengths for b in batches]
    lengths = np.concatenate(parts).astype(np.int64)
    lengths = lengths[lengths > 0]
    return np.stack([np.cumsum(lengths) - lengths, lengths], 1)
