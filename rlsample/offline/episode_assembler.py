"""Whole episodes out of fragments."""

from __future__ import annotations

import numpy as np

from rlsample.errors import ConfigError
from rlsample.sample_batch import AGENT_ID, EPS_ID, TERMINATED, TRUNCATED, SampleBatch, T

__all__ = ["EpisodeAssembler"]

_NEEDED = (EPS_ID, T, TERMINATED, TRUNCATED)


class EpisodeAssembler:
    """Joins the pieces of episodes, in whatever order they come.

    Rows of one ``eps_id`` (and ``agent_id``, where stored) belong together, in the order of ``t``. What is held are
    the pieces of episodes that are not yet whole.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], list[SampleBatch]] = {}

    def add(self, batch: SampleBatch) -> list[SampleBatch]:
        """Takes a fragment in; returns the episodes that became whole: from t = 0 to a terminated or truncated row.

        Raises:
            ConfigError: the batch lacks eps_id, t, terminated or truncated.
        """
        missing = [name for name in _NEEDED if name not in batch]
        if missing:
            raise ConfigError(f"episodes need the columns {', '.join(missing)}; this batch has {', '.join(batch)}")
        whole = []
        for piece in batch.split_by_episode():
            key = int(piece[EPS_ID][0]), int(piece[AGENT_ID][0]) if AGENT_ID in piece else 0
            pieces = self._open.setdefault(key, [])
            pieces.append(piece)
            runs = _runs(pieces)
            if len(runs) == 1 and _is_whole(runs[0]):
                whole.append(_joined(runs[0]))
                del self._open[key]
        return whole

    def rest(self) -> list[SampleBatch]:
        """The stretches without a gap of episodes that are not whole; they are held no longer."""
        stretches = [_joined(run) for pieces in self._open.values() for run in _runs(pieces)]
        self._open.clear()
        return stretches

    def __len__(self) -> int:
        """Episodes that are not whole."""
        return len(self._open)


def _runs(pieces: list[SampleBatch]) -> list[list[SampleBatch]]:
    """The pieces in order, in groups without a gap in ``t``."""
    runs: list[list[SampleBatch]] = []
    for piece in sorted(pieces, key=lambda piece: int(piece[T][0])):
        if runs and int(runs[-1][-1][T][-1]) + 1 == int(piece[T][0]):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _is_whole(run: list[SampleBatch]) -> bool:
    last = run[-1]
    return int(run[0][T][0]) == 0 and bool(last[TERMINATED][-1] or last[TRUNCATED][-1])


def _joined(run: list[SampleBatch]) -> SampleBatch:
    """One batch whose next observations are its own rows', but for the last."""
    whole = SampleBatch.concat(run) if len(run) > 1 else run[0]
    if not np.array_equal(np.diff(whole[T]), np.ones(whole.count - 1, np.int64)):
        raise ConfigError(f"episode {int(whole[EPS_ID][0])}: t does not count its rows one by one")
    return whole
