"""How the games of an Atari env are opened: in groups, or as one batch after the other of any games."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample.env.atari_any_games import AnyGames
from rlsample.env.atari_books import AnyGamesBooks, Books, NextStepBooks, SameStepBooks
from rlsample.env.atari_fleet import AtariFleet
from rlsample.env.atari_group import AtariGroup
from rlsample.env.atari_settings import AtariSettings, action_meanings
from rlsample.env.pool.pool_settings import usable_cpus

__all__ = ["AtariOpening"]


@dataclass(frozen=True)
class AtariOpening:
    """What is needed to open the games.

    Attributes:
        game: the ROM's id.
        settings: see :class:`~rlsample.env.atari_settings.AtariSettings`.
        all_ids: int64[num_envs], read-only, all slots.
        columns: lives, lengths and returns of all slots, for :class:`~rlsample.env.atari_books.Books`.
        obs_shape: of one observation.
        open_vector: see :func:`~rlsample.env.atari_group.open_vector_env`.
    """

    game: str
    settings: AtariSettings
    all_ids: np.ndarray
    columns: tuple[np.ndarray, ...]
    obs_shape: tuple[int, ...]
    open_vector: Callable[..., Any]

    def groups(self, same_step: bool) -> AtariFleet:
        """Games in the groups that the settings ask for, each with a vector env of its own."""
        settings, num_envs, start = self.settings, len(self.all_ids), 0
        groups: list[AtariGroup] = []
        outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        sizes = settings.group_sizes(num_envs)
        threads, first_core = self._threads_per_group(len(sizes)), settings.thread_affinity_offset
        for size in sizes:
            ids = self.all_ids[start : start + size] if size < num_envs else self.all_ids
            vector = self.open_vector(
                self.game, size, settings, same_step=same_step, num_threads=threads, first_core=first_core
            )
            columns = (c[start : start + size] for c in self.columns)
            books: Books = (
                SameStepBooks(*columns, obs_shape=self.obs_shape)
                if same_step
                else NextStepBooks(*columns, episodic_life=settings.episodic_life)
            )
            groups.append(AtariGroup(len(groups), ids, vector, books, self._press(), outcomes))
            start += size
            first_core += threads if first_core >= 0 else 0
        return AtariFleet(groups, outcomes, in_turn=settings.batch_size is None)

    def any_games(self) -> AtariFleet:
        """Batches of ``batch_size`` rows of any games, from one vector env."""
        settings, num_envs, size = self.settings, len(self.all_ids), self.settings.batch_size or len(self.all_ids)
        outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        vector = self.open_vector(
            self.game,
            num_envs,
            settings,
            same_step=False,
            num_threads=settings.num_threads or min(num_envs, len(usable_cpus())),  # ale-py: at most one per row
            first_core=settings.thread_affinity_offset,
            batch_size=size,
        )
        books = AnyGamesBooks(*self.columns, size=size, episodic_life=settings.episodic_life)
        group = AnyGames(self.all_ids, size, vector, books, self._press(), outcomes)
        return AtariFleet([group], outcomes, in_turn=True)

    def _press(self) -> int:
        """The action that goes on after a lost life."""
        meanings = action_meanings(self.game, self.settings.full_action_space)
        return meanings.index("FIRE") if self.settings.use_fire_reset and "FIRE" in meanings else 0

    def _threads_per_group(self, num_groups: int) -> int:
        """0: as many as there are cores, so that one group has them all while another is acted on.

        First come, several groups are always under way and share them: more threads would take turns on the cores.
        """
        total = self.settings.num_threads
        if total == 0 and num_groups > 1 and self.settings.batch_size is not None:
            total = len(usable_cpus())
        return total and max(1, total // num_groups)
