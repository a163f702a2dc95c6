"""Dividing rows among devices, and a device's rows into minibatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlsample.errors import ConfigError
from rlsample.sample_batch import SampleBatch

__all__ = ["fragment_minibatches", "row_minibatches", "split_fragments", "split_rows"]


def split_rows(batches: Sequence[SampleBatch], num_parts: int) -> tuple[list[list[SampleBatch]], int]:
    """Consecutive parts of equal size, as views.

    Returns:
        The parts, and how many rows are in none: the last ``total % num_parts``.

    Raises:
        ConfigError: fewer rows than parts.
    """
    total = sum(batch.count for batch in batches)
    size = total // num_parts
    if size == 0:
        raise ConfigError(f"{total} rows cannot be divided among {num_parts} devices; raise train_batch_size")
    parts = [_rows(batches, part * size, (part + 1) * size) for part in range(num_parts)]
    return parts, total - size * num_parts


def _rows(batches: Sequence[SampleBatch], start: int, stop: int) -> list[SampleBatch]:
    found, offset = [], 0
    for batch in batches:
        low, high = max(start - offset, 0), min(stop - offset, batch.count)
        if low < high:
            found.append(batch.slice(low, high))
        offset += batch.count
    return found


def split_fragments(batches: Sequence[SampleBatch], num_parts: int) -> list[list[SampleBatch]]:
    """Consecutive parts of about equal size that cut no fragment, as views. All rows are in one of them.

    Raises:
        ConfigError: fewer fragments than parts.
    """
    pieces: list[tuple[SampleBatch, int, int]] = []
    for batch in batches:
        lengths = np.array([batch.count]) if batch.fragment_lengths is None else batch.fragment_lengths
        stops = np.cumsum(lengths)
        pieces += [(batch, int(b - n), int(b)) for n, b in zip(lengths, stops, strict=True) if n]
    if len(pieces) < num_parts:
        raise ConfigError(
            f"{len(pieces)} fragments cannot be divided among {num_parts} devices; raise train_batch_size or num_envs"
        )
    middles = np.cumsum([b - a for _, a, b in pieces]) - [(b - a) / 2 for _, a, b in pieces]
    part_of = np.minimum(middles * num_parts // max(1, sum(b - a for _, a, b in pieces)), num_parts - 1).astype(int)
    for i in range(len(pieces)):  # every part gets a fragment: none may be left out, none may be too few to go round
        part_of[i] = min(max(part_of[i], num_parts - (len(pieces) - i)), i, (part_of[i - 1] if i else -1) + 1)
    parts: list[list[SampleBatch]] = [[] for _ in range(num_parts)]
    for part in range(num_parts):
        mine = [piece for piece, p in zip(pieces, part_of, strict=True) if p == part]
        parts[part] = [_joined(run) for run in _runs(mine)]
    return parts


def _runs(pieces: list[tuple[SampleBatch, int, int]]) -> list[list[tuple[SampleBatch, int, int]]]:
    runs: list[list[tuple[SampleBatch, int, int]]] = []
    for piece in pieces:
        if runs and runs[-1][-1][0] is piece[0]:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _joined(run: list[tuple[SampleBatch, int, int]]) -> SampleBatch:
    """Consecutive fragments of one batch as a view that knows their lengths."""
    part = run[0][0].slice(run[0][1], run[-1][2])
    part.fragment_lengths = np.array([stop - start for _, start, stop in run])
    return part


def row_minibatches(
    num_rows: int, num_parts: int, minibatch_size: int, rng: np.random.Generator
) -> list[list[np.ndarray]]:
    """One pass over parts of ``num_rows`` rows each: minibatch -> part -> int64 rows of that part, in random order.

    A minibatch takes equally many rows of every part, ``minibatch_size`` in all, rounded down to a multiple of the
    parts; the last one may be smaller. Every row is in one of them.

    Raises:
        ConfigError: a minibatch of fewer rows than parts.
    """
    size = minibatch_size // num_parts
    if size < 1:
        raise ConfigError(f"minibatch_size {minibatch_size} is less than a row for each of {num_parts} devices")
    orders = [rng.permutation(num_rows) for _ in range(num_parts)]
    return [[order[start : start + size] for order in orders] for start in range(0, num_rows, size)]


def fragment_minibatches(
    fragments: Sequence[np.ndarray], minibatch_size: int, rng: np.random.Generator
) -> list[list[np.ndarray]]:
    """One pass: minibatch -> part -> int64 fragments of that part, in random order; every fragment is in one of them.

    Args:
        fragments: per part int64[F, 2], first row and length.
        minibatch_size: rows a minibatch should have in all; it is met as well as whole fragments allow.
    """
    total = sum(int(part[:, 1].sum()) for part in fragments)
    number = max(1, round(total / minibatch_size))
    number = min(number, *(len(part) for part in fragments))
    orders = [np.array_split(rng.permutation(len(part)), number) for part in fragments]
    return [[order[i] for order in orders] for i in range(number)]
