"""Bringing an env back to where a sampler can begin, after a call that broke off."""

from __future__ import annotations

import contextlib

import numpy as np

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.lockstep import LockstepEnv
from rlsample.errors import EnvProtocolError

__all__ = ["reset_all_slots"]


def reset_all_slots(env: BaseEnv) -> StepBatch | None:
    """Takes what slots still owe, and resets them all, those of a vector env at once.

    Returns:
        The first observations; None: they come with a poll.

    Raises:
        EnvFailedError: a slot failed and may not be restarted.
    """
    if isinstance(env, LockstepEnv):
        env.begin_anew()
        return None
    for slot in env.all_ids.tolist():
        with contextlib.suppress(EnvProtocolError):  # it has not failed
            env.try_restart(np.array([slot]))
    with contextlib.suppress(EnvProtocolError):  # nothing is owed any more
        while True:
            batch = env.poll()
            if batch.failures:
                env.try_restart(np.array(list(batch.failures)))
    return env.try_reset(env.all_ids)
