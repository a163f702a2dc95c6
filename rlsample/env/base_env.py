"""The polled env: one contract for every kind of environment.

    with as_base_env("CartPole-v1", num_envs=2, seed=0) as env:
        batch = env.poll()                                  # two first observations
        env.send_actions(batch.env_ids, np.array([0, 1]))
        batch = env.poll()                                  # two transitions

A slot goes through these states; :meth:`BaseEnv.poll` moves it from *busy* on:

    (new) --poll--> waiting --send_actions--> busy --poll--> waiting | ended | failed
    ended, waiting --try_reset--> waiting (at once) or resetting --poll--> waiting
    failed --try_restart--> resetting --poll--> waiting
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np

from rlsample.tree import Tree

__all__ = ["BaseEnv", "EnvContext", "LoggedActions", "StepBatch", "slot_seed"]

E = TypeVar("E", bound="BaseEnv")
_NONE: Mapping[int, Any] = {}


class LoggedActions(NamedTuple):
    """Of K rows of a served env, those that brought their own action.

    Attributes:
        mask: bool[K].
        actions: tree [K, ...] in the dtypes of the action space; undefined where not in the mask.
        logp: float32[K], the log-probability the client gave, NaN where it gave none; undefined as above.
    """

    mask: np.ndarray
    actions: Tree
    logp: np.ndarray


class StepBatch(NamedTuple):
    """K rows that became ready together, as columns. A slot occurs at most once.

    Attributes:
        env_ids: int64[K], the slots.
        obs: tree of arrays [K, ...] in the space's own dtypes. Of a row that ends an episode: its final observation.
        rewards: float32[K]; 0 where ``is_first``.
        terminated: bool[K].
        truncated: bool[K]; may be true together with ``terminated``.
        is_first: bool[K], the row is an episode's first observation: no transition yet.
        infos: row (not slot) -> info dict, only for rows whose env returned a non-empty one.
        failures: slot -> exception. A failed slot has no row in this batch.
        agent_ids: int64[K] in multi-agent envs, else None.
        off_policy_actions: where a served env acted by itself, a
            :class:`LoggedActions` (``mask``, ``actions``, ``logp``): which rows brought their action, and what it was.
            Else None.

    The env never writes to these arrays again. Those that hold nothing (no row ended, say) may be shared and read-only.
    """

    env_ids: np.ndarray
    obs: Tree
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_first: np.ndarray
    infos: Mapping[int, dict[str, Any]] = _NONE
    failures: Mapping[int, BaseException] = _NONE
    agent_ids: np.ndarray | None = None
    off_policy_actions: LoggedActions | None = None


@dataclass(frozen=True)
class EnvContext:
    """What an env factory is told: ``factory(ctx) -> gymnasium.Env``.

    Attributes:
        worker_index: the evaluator's index, 0 for the local one.
        slot_index: the sub-env's slot in ``[0, num_envs)``.
        num_envs: slots of this evaluator.
        incarnation: 0, then +1 each time the slot's env is rebuilt after a failure.
        config: the user's ``env_config``.
    """

    worker_index: int = 0
    slot_index: int = 0
    num_envs: int = 1
    incarnation: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


def slot_seed(seed: int | None, worker_index: int, slot: int, incarnation: int = 0) -> int | None:
    """The seed of one sub-env's first reset: the same on every backend, shared by no two slots, workers or runs.

    A child of ``SeedSequence(seed)``, addressed by (worker, slot, incarnation). None gives None: the env picks its own.
    """
    if seed is None:
        return None
    child = np.random.SeedSequence(int(seed), spawn_key=(worker_index, slot, incarnation))
    return int(child.generate_state(1)[0])


class BaseEnv(ABC):
    """Environments behind one polled interface. A context manager.

    Class attributes that a subclass may set:
        lockstep: True if all slots have to be stepped together: send_actions may be called in parts, but poll raises
            until each slot has an action or a pending reset.
        steps_ahead: True if work goes on between calls (pools, served envs); False if envs step only inside poll.

    No env is reset before the first poll, which delivers every slot's first observation (pools: the first few polls).
    """

    num_envs: int
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    lockstep: bool = False
    steps_ahead: bool = False

    @functools.cached_property
    def all_ids(self) -> np.ndarray:
        """int64[num_envs], read-only: 0, 1, ... A poll that brings every slot in order hands out this very object, and
        receivers may take that as the sign of a lock-step batch."""
        ids = np.arange(self.num_envs)
        ids.flags.writeable = False
        return ids

    @abstractmethod
    def poll(self, timeout_s: float | None = None) -> StepBatch:
        """Returns the rows that are ready, waiting for at least one.

        An inline env steps its sub-envs in here. Empty (K = 0, no failures) only when ``timeout_s`` ran out.

        Raises:
            EnvProtocolError: nothing is pending; the message says which slots wait for what.
            EnvClosedError: the env is closed, or was closed while waiting.
        """

    @abstractmethod
    def send_actions(self, env_ids: np.ndarray, actions: Tree) -> None:
        """Gives actions to any subset of the slots that wait for one.

        Args:
            env_ids: int64[K], distinct.
            actions: tree [K, ...] of the action space. Copied or consumed before this returns.

        Raises:
            EnvProtocolError: a slot is unknown, doubled, busy, ended or not yet started.
            SpaceError: an action is outside the action space, or K differs.
            After either, nothing was stepped and no slot changed its state.
        """

    @abstractmethod
    def try_reset(self, env_ids: np.ndarray) -> StepBatch | None:
        """Starts new episodes in slots that ended or wait for an action.

        Returns:
            The first observations (every row ``is_first``, in the order asked; a reset that failed is in ``failures``
            instead), or None if they will arrive in a later poll.

        Raises:
            EnvProtocolError: a slot is unknown, doubled, busy or failed.
        """

    @abstractmethod
    def try_restart(self, env_ids: np.ndarray) -> None:
        """Replaces failed sub-envs; their first observations arrive in a later poll.

        Raises:
            EnvProtocolError: a slot has not failed.
            EnvFailedError: the slot's restart budget is used up; chained to the last failure.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes each sub-env once. Idempotent, bounded in time, callable from any thread."""

    def get_state(self) -> bytes | None:
        """Everything needed to continue bit for bit, or None if this env cannot promise that."""
        return None

    def set_state(self, state: bytes) -> None:
        """Continues from :meth:`get_state`. Only for bytes that this program wrote itself: they are unpickled."""
        raise NotImplementedError(f"{type(self).__name__} has no saved state")

    def sub_envs(self) -> list[Any]:
        """The user's env objects, by slot, where they live in this process; else an empty list."""
        return []

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
