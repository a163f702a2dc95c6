"""Whole episodes out of fragments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlsample.errors import ConfigError
from rlsample.sample_batch import AGENT_ID, EPS_ID, NEXT_OBS, OBS, TERMINATED, TRUNCATED, NextObs, SampleBatch, T
from rlsample.tree import Tree, gather, leaves

__all__ = ["EpisodeAssembler"]

_NEEDED = (EPS_ID, T, TERMINATED, TRUNCATED)


class EpisodeAssembler:
    """Joins the pieces of episodes, in whatever order they come.

    A piece follows another one of its ``eps_id`` (and ``agent_id``, where stored) if ``t`` goes on from it and, where
    there are next observations, its first observation is the one that came next there, bit for bit. So the logs of
    several runs, whose ids may be the same, stay apart. What is held are the pieces of episodes that are not yet whole.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], list[_Chain]] = {}

    def add(self, batch: SampleBatch) -> list[SampleBatch]:
        """Takes a fragment in; returns the episodes that became whole: from t = 0 to a terminated or truncated row.

        Raises:
            ConfigError: the batch lacks eps_id, t, terminated or truncated.
        """
        missing = [name for name in _NEEDED if name not in batch]
        if missing:
            raise ConfigError(f"episodes need the columns {', '.join(missing)}; this batch has {', '.join(batch)}")
        whole = []
        for start, length in zip(*batch.sequences(max(1, batch.count)), strict=True):
            piece = batch.slice(int(start), int(start + length))
            key = int(piece[EPS_ID][0]), int(piece[AGENT_ID][0]) if AGENT_ID in piece else 0
            chains = self._open.setdefault(key, [])
            chain = _Chain.of(piece)
            for other in chains:
                if other.goes_on_in(chain):
                    chains.remove(other)
                    chain = other.joined(chain)
                    break
            for other in chains:
                if chain.goes_on_in(other):
                    chains.remove(other)
                    chain = chain.joined(other)
                    break
            if chain.start == 0 and chain.ended:
                whole.append(chain.batch())
            else:
                chains.append(chain)
            if not chains:
                del self._open[key]
        return whole

    def rest(self) -> list[SampleBatch]:
        """The stretches without a gap of episodes that are not whole; they are held no longer."""
        stretches = [chain.batch() for chains in self._open.values() for chain in chains]
        self._open.clear()
        return stretches

    def __len__(self) -> int:
        """Stretches that are held."""
        return sum(map(len, self._open.values()))


@dataclass(frozen=True)
class _Chain:
    """Pieces that follow each other.

    Attributes:
        start, stop: steps [start, stop).
        first, after: bytes of the first observation, and of the one after the last row; None: not known.
        ended: the last row is terminated or truncated.
    """

    pieces: tuple[SampleBatch, ...]
    start: int
    stop: int
    first: bytes | None
    after: bytes | None
    ended: bool

    @classmethod
    def of(cls, piece: SampleBatch) -> _Chain:
        t, last = piece[T], piece.count - 1
        known = OBS in piece and NEXT_OBS in piece
        return cls(
            (piece,),
            int(t[0]),
            int(t[0]) + piece.count,
            _bytes(gather(piece[OBS], slice(0, 1))) if known else None,
            _bytes(piece.slice(last, piece.count)[NEXT_OBS]) if known else None,
            bool(piece[TERMINATED][-1] or piece[TRUNCATED][-1]),
        )

    def goes_on_in(self, other: _Chain) -> bool:
        fits = self.after is None or other.first is None or self.after == other.first
        return self.stop == other.start and not self.ended and fits

    def joined(self, other: _Chain) -> _Chain:
        return _Chain(self.pieces + other.pieces, self.start, other.stop, self.first, other.after, other.ended)

    def batch(self) -> SampleBatch:
        """Copied; next observations are the next rows' own, but for the last."""
        bare = [{name: column for name, column in piece.items() if name != NEXT_OBS} for piece in self.pieces]
        whole = SampleBatch.concat([SampleBatch(columns) for columns in bare])
        if self.after is not None:
            last = self.pieces[-1]
            index = np.arange(1, whole.count + 1)
            index[-1] = -1
            whole.next_obs_source = NextObs(index, last.slice(last.count - 1, last.count)[NEXT_OBS])
        return whole


def _bytes(tree: Tree) -> bytes:
    return b"".join(leaf.tobytes() for leaf in leaves(tree))
