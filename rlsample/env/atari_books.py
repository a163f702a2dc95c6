"""What is known about each running game, and how ale-py's batches become rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = ["AnyGamesBooks", "Books", "NextStepBooks", "Rows", "SameStepBooks"]

_TRUE = b"\x01"


class Rows(NamedTuple):
    """A batch of n games, one row each.

    Attributes:
        obs: uint8[n, stack, height, width(, 3)], of a row that ends an episode its final observation.
        rewards: float32[n], as the game gives them.
        terminated, truncated: bool[n].
        is_first: bool[n], or None: no row is one.
        over: bool[n], rows said to be first ones whose game pressing FIRE ended, or None: no row is one.
        infos: row -> dict, of rows where a life was lost or a game ended.
    """

    obs: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_first: np.ndarray | None
    over: np.ndarray | None
    infos: dict[int, dict[str, Any]]


class Books:
    """Lives, raw return and length of each of n games, in arrays of the owner.

    Attributes:
        lives: int32[n].
        lengths: int32[n], steps of the game so far (not of the life).
        returns: float64[n], of the game so far.
        pressing: bool[n], games where the next action is ours, see :class:`NextStepBooks`; None: no game.
        first_obs: the first observations of games, see :class:`SameStepBooks`.
    """

    pressing: np.ndarray | None = None
    first_obs: np.ndarray

    def __init__(self, lives: np.ndarray, lengths: np.ndarray, returns: np.ndarray) -> None:
        self.lives, self.lengths, self.returns = lives, lengths, returns
        self._no = np.zeros(len(lives), bool)

    def take(self, batch: Any) -> Rows:
        """Rows of what ``recv`` returned, whose arrays may be kept and changed."""
        raise NotImplementedError

    def begin(self, games: np.ndarray, lives: np.ndarray) -> None:
        """These games begin anew; ``lives`` is of all n."""
        self.lives[games] = lives[games]
        self.returns[games] = 0
        self.lengths[games] = 0

    def _count(self, points: np.ndarray, info: Mapping[str, Any]) -> np.ndarray:
        """One more step of each game; which games lost a life (bool[n], wrong where a game began anew).

        ``_no`` itself if the lives of no game changed.
        """
        self.returns += points
        self.lengths += 1
        lives = info["lives"]
        if lives.tobytes() == self.lives.tobytes():
            return self._no
        lost = (lives < self.lives) & (lives > 0)
        self.lives[:] = lives
        return lost

    def _ended(self, game_over: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        """bool[n]; ``_no`` itself if no game ended."""
        ended = game_over | truncated
        return ended if _TRUE in ended.tobytes() else self._no

    def _infos(self, lost: np.ndarray, ended: np.ndarray, game_over: np.ndarray) -> dict[int, dict[str, Any]]:
        """The infos of games that lost a life, and of the last rows of games that ended."""
        infos: dict[int, dict[str, Any]] = {}
        if lost is not self._no:
            for game in np.flatnonzero(lost).tolist():
                infos[game] = {"life_lost": True, "lives": int(self.lives[game])}
        if ended is not self._no:
            for game in np.flatnonzero(ended).tolist():
                infos[game] = {
                    **infos.get(game, {}),
                    "game_over": bool(game_over[game]),
                    "game_return": float(self.returns[game]),
                    "game_length": int(self.lengths[game]),
                }
        return infos


class SameStepBooks(Books):
    """For ``AutoresetMode.SAME_STEP``: a game that ends has begun anew by the time its last row arrives.

    ``first_obs``, uint8[n, ...], holds the first observations of games that ended; of others, anything.
    """

    def __init__(self, *columns: np.ndarray, obs_shape: tuple[int, ...]) -> None:
        super().__init__(*columns)
        self.first_obs = np.zeros((len(self.lives), *obs_shape), np.uint8)

    def take(self, batch: Any) -> Rows:
        obs, points, game_over, truncated, info = batch
        lost = self._count(points, info)
        ended = self._ended(game_over, truncated)
        infos = self._infos(lost if ended is self._no else lost & ~ended, ended, game_over)
        if ended is not self._no:
            games = np.flatnonzero(ended)
            self.first_obs[games] = obs[games]
            obs[games] = info["final_obs"][games]  # a whole batch, but rows of other games hold no observation
            self.begin(games, info["lives"])
        return Rows(obs, points.astype(np.float32), game_over, truncated, None, None, infos)


class NextStepBooks(Books):
    """For ``AutoresetMode.NEXT_STEP``: the step after a game's end resets it.

    With ``episodic_life`` a lost life ends the episode, too; the step after it presses FIRE (or nothing, in games
    without) and its observation is the first one of the next episode of the same game.
    """

    def __init__(self, *columns: np.ndarray, episodic_life: bool) -> None:
        super().__init__(*columns)
        self._episodic_life = episodic_life
        self._resetting = self._no  # games that ale-py resets in the next step

    def begin(self, games: np.ndarray, lives: np.ndarray) -> None:
        super().begin(games, lives)
        self._resetting = self._resetting.copy()
        self._resetting[games] = False
        if self.pressing is not None:
            self.pressing[games] = False

    def take(self, batch: Any) -> Rows:
        obs, points, game_over, truncated, info = batch
        lost, rewards = self._count(points, info), points.astype(np.float32)
        is_first, over = None, None
        if self._resetting is not self._no:
            is_first = self._resetting
            lost = lost & ~is_first
            super().begin(np.flatnonzero(is_first), info["lives"])
        if self.pressing is not None:
            is_first = self.pressing if is_first is None else is_first | self.pressing
        ended = self._resetting = self._ended(game_over, truncated)
        infos = self._infos(lost, ended, game_over)
        self.pressing, terminated = None, game_over
        if self._episodic_life and lost is not self._no:
            ends = lost if is_first is None else lost & ~is_first
            self.pressing, terminated = ends & ~ended, game_over | ends
        if is_first is not None:
            rewards[is_first] = 0  # after a lost life it may be none: only the game's return has it
            over = is_first & ended if _TRUE in (is_first & ended).tobytes() else None
            terminated, truncated = terminated & ~is_first, truncated & ~is_first
        return Rows(obs, rewards, terminated, truncated, is_first, over, infos)


class AnyGamesBooks(NextStepBooks):
    """Next-step books for batches of ``size`` rows, each of other games; every game begins with a reset.

    The columns of the owner have an entry for each of all games, which ``info["env_id"]`` names.
    """

    def __init__(self, *columns: np.ndarray, size: int, episodic_life: bool) -> None:
        mine = [np.zeros(size, column.dtype) for column in columns]
        super().__init__(*mine, episodic_life=episodic_life)
        self._pairs = list(zip(mine, columns, strict=True))
        self._to_reset, self._to_press = np.ones(len(columns[0]), bool), np.zeros(len(columns[0]), bool)

    def take(self, batch: Any) -> Rows:
        games = batch[-1]["env_id"]
        for mine, of_all in self._pairs:
            of_all.take(games, out=mine, mode="clip")
        resetting, pressing = self._to_reset[games], self._to_press[games]
        self._resetting = resetting if _TRUE in resetting.tobytes() else self._no
        self.pressing = pressing if _TRUE in pressing.tobytes() else None
        rows = super().take(batch)
        for mine, of_all in self._pairs:
            of_all[games] = mine
        self._to_reset[games] = self._resetting
        self._to_press[games] = False if self.pressing is None else self.pressing
        return rows
