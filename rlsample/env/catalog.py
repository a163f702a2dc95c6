"""What can be made here by name, and what would have to be installed for the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import gymnasium
from gymnasium.envs.registration import EnvSpec

__all__ = ["EnvRecord", "list_all_envs"]

_FAMILIES = {
    "classic_control": ("classic control", "", ""),
    "toy_text": ("toy text", "", ""),
    "box2d": ("box2d", "Box2D", "gymnasium[box2d]"),
    "mujoco": ("mujoco", "mujoco", "gymnasium[mujoco]"),
    "phys2d": ("jax classic control", "jax", "gymnasium[jax]"),
    "tabular": ("jax toy text", "jax", "gymnasium[jax]"),
}
"""Package below ``gymnasium.envs`` -> family, the module it needs, and what pip installs for it."""
_ATARI, _ALE = "atari (C++)", "ALE"


@dataclass(frozen=True)
class EnvRecord:
    """One name that :func:`~rlsample.env.convert.as_base_env` takes.

    Attributes:
        id: ``"CartPole-v1"``, ``"ALE/Pong-v5"``, ``"atari:Pong-v5"``.
        family: ``classic control``, ``toy text``, ``box2d``, ``mujoco``, ``ALE``, ``atari (C++)``; of envs that other
            packages registered, the package.
        installed: whether what it needs is here.
        install: the pip command that brings it, else ``""``.
        max_episode_steps: after which it is truncated; None: no limit is registered.
        vector: whether it has a vector form of its own.
    """

    id: str
    family: str
    installed: bool
    install: str
    max_episode_steps: int | None
    vector: bool


def list_all_envs() -> list[EnvRecord]:
    """Every env that can be made by name, by family and then by id.

    That is: what is registered with Gymnasium at the time (import a package first to have its envs), the ALE games
    under Gymnasium's ids, and the same games under ``atari:``, preprocessed and on C++ threads.
    """
    return sorted({*_registered(), *_atari()}, key=lambda record: (record.family, record.id))


def _registered() -> Iterator[EnvRecord]:
    if _has("ale_py"):
        import ale_py

        gymnasium.register_envs(ale_py)
    for spec in list(gymnasium.registry.values()):
        family, module, package = _family_of(spec)
        if family is None:
            continue
        installed = not module or _has(module)
        install = "" if installed else f"pip install '{package}'"
        vector = spec.vector_entry_point is not None
        yield EnvRecord(spec.id, family, installed, install, spec.max_episode_steps, vector)


def _family_of(spec: EnvSpec) -> tuple[str | None, str, str]:
    """Family, the module it needs and the package that brings it; no family: it cannot be made by name."""
    entry = spec.entry_point if spec.entry_point is not None else spec.vector_entry_point
    module = entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")
    if module.startswith("gymnasium.envs."):
        family, needs, package = _FAMILIES.get(module.split(".")[2], ("gymnasium", "", ""))
        gone = family == "mujoco" and spec.id.endswith(("-v2", "-v3"))  # of mujoco-py, which is no more
        return None if gone else family, needs, package
    if module.startswith(("gymnasium.", "shimmy.")):
        return None, "", ""  # wrappers that want an env, such as GymV21Environment-v0
    return (_ALE if module.startswith("ale_py") else module.partition(".")[0]), "", ""


def _atari() -> Iterator[EnvRecord]:
    if not _has("ale_py"):
        yield EnvRecord("atari:Pong-v5", _ATARI, False, "pip install ale-py", 27_000, True)
        return
    from rlsample.env.atari_settings import AtariSettings, atari_games

    limit = AtariSettings().max_episode_steps
    for game in atari_games():
        name = "".join(part.capitalize() for part in game.split("_"))
        yield EnvRecord(f"atari:{name}-v5", _ATARI, True, "", limit, True)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
