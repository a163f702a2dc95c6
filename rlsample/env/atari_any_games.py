"""Atari games that ale-py steps one by one: a batch has the rows that were ready first, of any games."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np

from rlsample.env.atari_books import AnyGamesBooks, Rows
from rlsample.env.atari_group import AtariGroup
from rlsample.env.slot_states import ENDED, WAITING, SlotStates
from rlsample.errors import EnvProtocolError

__all__ = ["AnyGames"]


class AnyGames(AtariGroup):
    """``size`` of all games, other ones after each step.

    ale-py takes the next actions for the games of its last batch only. So the next batch can be waited for once each
    of them has one.

    Args:
        all_ids: int64[num_envs], read-only: all slots.
        size: rows of a batch, below num_envs.
        vector: ale-py's vector env of all games, with this ``batch_size``.
        books, press, outcomes: as in :class:`~rlsample.env.atari_group.AtariGroup`.
    """

    changes = True

    def __init__(
        self,
        all_ids: np.ndarray,
        size: int,
        vector: Any,
        books: AnyGamesBooks,
        press: int,
        outcomes: queue.SimpleQueue[Any],
    ) -> None:
        super().__init__(0, all_ids[:size], vector, books, press, outcomes)
        self.members = all_ids
        self._row = np.full(len(all_ids), -1)  # of each slot, in this batch
        self._one_to_n = np.arange(size)

    def rows_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self._row[ids]
        mine = rows >= 0
        return mine, rows[mine]

    def begin_reset(self, rows: np.ndarray, seeds: np.ndarray | None) -> None:
        """Begins all games; their first rows come in this and the next batches."""
        self.flying = self.in_background = True
        self._calls.begin(self.index, _reset, self._vector, seeds)

    def land(self) -> Rows:
        batch = self._landed()
        self._row[self.ids] = -1
        self.ids32 = batch[-1]["env_id"]
        self.ids = self.at = self.ids32.astype(np.int64)
        self.ids.flags.writeable = self.ids32.flags.writeable = False
        self._row[self.ids] = self._one_to_n
        return self.books.take(batch)

    def unanswered(self, states: SlotStates) -> EnvProtocolError:
        """The error of a receive before each row of the last batch was answered."""
        ids = np.sort(self.ids)
        slots = ids[np.isin(states.code[ids], (WAITING, ENDED))].tolist()
        return EnvProtocolError(
            f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))} of the last recv wait for actions: send "
            "them before the next recv, or make the env with recv_ahead=True, whose games step in fixed groups"
        )


def _reset(vector: Any, seeds: np.ndarray | None) -> Any:
    """As a step's batch."""
    obs, info = vector.reset(seed=seeds)
    no = np.zeros(len(obs), bool)
    return obs, np.zeros(len(obs), np.int32), no, no.copy(), info
