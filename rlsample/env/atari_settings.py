"""Options of Atari games, and the names games go by."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsample.errors import ConfigError, unknown_name
from rlsample.settings import from_options, option

__all__ = ["AtariSettings", "action_meanings", "atari_games", "rom_id"]

_FIXED = {
    "use_inter_area_resize": (True, "ale-py always resizes by area"),
    "zero_discount_on_life_loss": (False, "there is no discount column; see life_lost in the infos"),
    "gym_reset_return_info": (True, "reset always returns infos"),
    "max_num_players": (1, "games here have one player"),
    "mode": (-1, "ale-py's vector env plays the default mode"),
    "difficulty": (-1, "ale-py's vector env plays the default difficulty"),
}
"""Options of EnvPool that have one value here, and why."""
_VERSION = re.compile(r"-v\d+$")


@dataclass(frozen=True)
class AtariSettings:
    """Options of :func:`~rlsample.env.atari.make_atari`, with EnvPool's names and defaults.

    Raises:
        ConfigError: a value that cannot work.
    """

    batch_size: int | None = option(
        None, "rows of a poll, first come, first served; none: all, in order. Best as a divisor of num_envs"
    )
    recv_ahead: bool = option(
        False,
        "with batch_size: recv may be called again before all rows of the last batch have their actions; games then "
        "step in fixed groups, which is slower",
    )
    groups: int = option(1, "games in so many groups, polled in turn: one steps while another is acted on; 2 is best")
    num_threads: int = option(
        0, "emulator threads; 0: one per core (with groups: for each group), at most one per game of a group"
    )
    thread_affinity_offset: int = option(-1, "pin thread i to core (offset + i) mod cores; -1: do not pin")
    frame_skip: int = option(4, "frames per step; the action is repeated, the reward is their sum")
    noop_max: int = option(30, "a new game begins with up to so many frames without action; 0: none")
    stack_num: int = option(4, "the last so many frames are one observation")
    img_height: int = option(84, "rows of pixels")
    img_width: int = option(84, "columns of pixels")
    gray_scale: bool = option(True, "one channel; false: RGB, observations [stack, height, width, 3]")
    episodic_life: bool = option(False, "an episode ends with a life; the next one goes on with the same game")
    reward_clip: bool = option(
        False,
        "recv gives the sign of the reward; poll cannot (use the evaluator's clip_rewards, which keeps returns raw)",
    )
    max_episode_steps: int = option(27_000, "steps (not frames) after which a game is truncated")
    repeat_action_probability: float = option(0.0, "sticky actions: chance that a frame repeats the last action")
    full_action_space: bool = option(False, "all 18 actions; false: those the game uses")
    use_fire_reset: bool = option(True, "press FIRE to start, in games that have it")

    def __post_init__(self) -> None:
        for name in ("groups", "frame_skip", "stack_num", "img_height", "img_width", "max_episode_steps"):
            _require_int(name, getattr(self, name), 1)
        for name, least in (("num_threads", 0), ("noop_max", 0), ("thread_affinity_offset", -1)):
            _require_int(name, getattr(self, name), least)
        if self.batch_size is not None:
            _require_int("batch_size", self.batch_size, 1)
            if self.groups > 1:
                raise ConfigError("batch_size is for first come, first served, groups for turns; set one of them")
        for name in ("recv_ahead", "gray_scale", "episodic_life", "reward_clip", "full_action_space", "use_fire_reset"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not 0 <= self.repeat_action_probability <= 1:
            raise ConfigError(f"repeat_action_probability must be in [0, 1], got {self.repeat_action_probability!r}")
        if self.max_episode_steps * self.frame_skip >= 1 << 31:
            raise ConfigError(
                f"max_episode_steps={self.max_episode_steps} x frame_skip={self.frame_skip} must be below 2**31 frames"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AtariSettings:
        """Settings made of options, EnvPool's own included.

        Raises:
            ConfigError: an unknown name (the nearest is named), or an EnvPool option at a value there is not here.
        """
        mine = dict(options)
        for name, (value, why) in _FIXED.items():
            if name in mine and mine.pop(name) != value:
                raise ConfigError(
                    f"{name} can only be {value!r}: {why} (docs/atari.md lists the differences to EnvPool)"
                )
        return from_options(cls, mine)

    def group_sizes(self, num_envs: int) -> list[int]:
        """Games of each group.

        With ``batch_size`` b, groups of gcd(num_envs, b) games: a batch is then always made of whole groups.

        Raises:
            ConfigError: more rows or groups than games.
        """
        for name in ("batch_size", "groups"):
            if (getattr(self, name) or 1) > num_envs:
                raise ConfigError(f"{name}={getattr(self, name)} is more than num_envs={num_envs}")
        if self.batch_size is not None:
            size = math.gcd(num_envs, self.batch_size)
            return [size] * (num_envs // size)
        return [num_envs // self.groups + (k < num_envs % self.groups) for k in range(self.groups)]


def _require_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an int >= {least}, got {value!r}")


def atari_games() -> list[str]:
    """The ids of the games that are installed (``"ms_pacman"``), in order."""
    return list(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """ale-py reads and hashes each game's file to say so: once is enough."""
    from ale_py import roms

    return tuple(sorted(rom for rom in roms.get_all_rom_ids() if roms.get_rom_path(rom) is not None))


def rom_id(task: str) -> str:
    """``"ms_pacman"`` for ``"MsPacman-v5"`` (EnvPool), ``"ALE/MsPacman-v5"`` (Gymnasium) or ``"ms_pacman"`` itself.

    Raises:
        ConfigError: no such game; the nearest is named.
    """
    games = {game.replace("_", ""): game for game in atari_games()}
    name = _VERSION.sub("", task.removeprefix("ALE/"))
    game = games.get(name.replace("_", "").lower())
    if game is None:
        raise unknown_name("Atari game", name.lower(), games.values())
    return game


@functools.lru_cache(maxsize=256)
def action_meanings(game: str, full: bool) -> tuple[str, ...]:
    """What each action presses, in order: ``("NOOP", "FIRE", ...)``. Loads the game once (0.1 s)."""
    import ale_py
    from ale_py import roms

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(str(roms.get_rom_path(game)))
    return tuple(a.name for a in (ale.getLegalActionSet() if full else ale.getMinimalActionSet()))
