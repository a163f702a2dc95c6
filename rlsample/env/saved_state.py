"""Pickling of users' envs where that keeps their state."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from gymnasium.utils import EzPickle

__all__ = ["pickled"]


def pickled(state: Any, envs: Iterable[Any]) -> bytes | None:
    """``state`` as bytes, or None if it does not pickle, or if one of ``envs`` would lose what it is in the middle of.

    An EzPickle env (Atari, Box2D, MuJoCo) pickles its constructor's arguments only.
    """
    if any(env is None or isinstance(getattr(env, "unwrapped", env), EzPickle) for env in envs):
        return None
    try:
        return pickle.dumps(state)
    except Exception:  # whatever a user's env may raise: it has no saved state
        return None
