"""Plays a BaseEnv with random legal actions, trusting nothing it says about its own state."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.spaces import ObsWriter, zeros_columns
from rlsample.errors import EnvProtocolError
from rlsample.tree import Tree, flatten, map_tree

__all__ = [
    "AT_ONCE_S",
    "Conditions",
    "ConformanceError",
    "Player",
    "Row",
    "keys_of",
    "map_columns",
    "outcome_of",
    "row_of",
]

AT_ONCE_S = 2.0
_PATIENCE_S = 20.0


class ConformanceError(AssertionError):
    """A BaseEnv breaks a rule.

    Attributes:
        rule: 1 to 10.
        what: what was looked at.
        got, expected: what was seen, and what the rule asks for.
    """

    def __init__(self, rule: int, what: str, got: object, expected: object) -> None:
        super().__init__(f"rule {rule}: {what}: got {got}, expected {expected}")
        self.rule, self.what, self.got, self.expected = rule, what, got, expected


@dataclass
class Row:
    """One row as it arrived (copied), and what the player had asked for: ``first`` or ``step``."""

    slot: int
    asked: str
    action: Any
    obs: Tree
    reward: np.ndarray
    terminated: bool
    truncated: bool
    is_first: bool

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    def key(self) -> tuple[Any, ...]:
        """Equal for rows that are equal bit for bit (NaN too)."""
        return keys_of(self.obs), self.reward.tobytes(), self.terminated, self.truncated, self.is_first


class Player:
    """Keeps its own account of what each slot owes: nothing (waiting, ended), a first row, or a step's row.

    A row of a slot that owes none is put into ``surplus``; slots whose row never came into ``lost``. The k-th action of
    a slot depends on the seed, the slot and k alone, so that every backend is given the same ones.

    Attributes:
        rows: slot -> its rows so far.
        batches: every StepBatch, with copies of its columns taken on arrival.
    """

    def __init__(self, env: BaseEnv, seed: int) -> None:
        self.env, self.seed = env, seed
        self.rows: dict[int, list[Row]] = {slot: [] for slot in range(env.num_envs)}
        self.batches: list[tuple[StepBatch, list[Tree]]] = []
        self.waiting: set[int] = set()
        self.ended: set[int] = set()
        self.owed: dict[int, tuple[str, Any]] = dict.fromkeys(range(env.num_envs), ("first", None))
        self.failures: dict[int, BaseException] = {}
        self.surplus: list[int] = []
        self.lost: list[int] = []
        self._space = copy.deepcopy(env.action_space)
        self._writer = ObsWriter(env.action_space, any_size=True)
        self._sent = [0] * env.num_envs

    # ------------------------------------------------------------------ playing

    def play(self, rounds: int, between: Callable[[Player], None] | None = None) -> Player:
        """Starts, then gives every slot ``rounds`` actions or resets; ``between`` is called before each round."""
        self.collect()
        for _ in range(rounds):
            if between is not None:
                between(self)
            self.round()
        return self

    def round(self) -> None:
        """Resets the slots that ended, acts in those that wait, and collects every row that is owed."""
        if self.ended:
            self.reset(sorted(self.ended))
        self.send(sorted(self.waiting))
        self.collect()

    def send(self, slots: list[int]) -> None:
        """Sends each slot its next action, if there are any."""
        if not slots:
            return
        columns = zeros_columns(self._space, (len(slots),))
        for row, slot in enumerate(slots):
            action = self.action(slot)
            self._writer.write(columns, row, action, slot, None)
            self.owed[slot] = ("step", action)
            self._sent[slot] += 1
            self.waiting.discard(slot)
        self.env.send_actions(np.array(slots), columns)

    def action(self, slot: int) -> Any:
        """The slot's next action."""
        self._space.seed(int(np.random.default_rng([self.seed, slot, self._sent[slot]]).integers(2**31)))
        return self._space.sample()

    def legal(self, slots: list[int]) -> Tree:
        """A batch of legal actions that is not counted as sent."""
        columns = zeros_columns(self._space, (len(slots),))
        for row, slot in enumerate(slots):
            self._writer.write(columns, row, self.action(slot), slot, None)
        return columns

    def reset(self, slots: list[int]) -> None:
        """Asks for new episodes; takes the first rows if they come at once."""
        first = self.env.try_reset(np.array(slots))
        for slot in slots:
            self.waiting.discard(slot)
            self.ended.discard(slot)
            self.owed[slot] = ("first", None)
        if first is not None:
            self.receive(first)

    def collect(self) -> None:
        """Polls until no row is owed; slots whose row does not come are ``lost``."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.owed:
            try:
                batch = self.env.poll(timeout_s=_PATIENCE_S)
            except EnvProtocolError:
                break
            self.receive(batch)
            if time.monotonic() > deadline:
                break
        self.lost += sorted(self.owed)
        self.waiting |= set(self.owed)
        self.owed.clear()

    def receive(self, batch: StepBatch) -> None:
        """Takes a batch into account."""
        self.batches.append((batch, map_columns(batch)))
        for slot, failure in batch.failures.items():
            self.failures[slot] = failure
            self.owed.pop(slot, None)
        for row, slot in enumerate(np.asarray(batch.env_ids).tolist()):
            if slot not in self.owed:
                self.surplus.append(slot)
                continue
            asked, action = self.owed.pop(slot)
            obs = row_of(batch.obs, row)
            flags = bool(batch.terminated[row]), bool(batch.truncated[row]), bool(batch.is_first[row])
            got = Row(slot, asked, action, obs, np.array(batch.rewards[row]), *flags)
            self.rows[slot].append(got)
            (self.ended if got.ended else self.waiting).add(slot)

    def all_rows(self) -> list[Row]:
        """Every row, slot by slot."""
        return [row for rows in self.rows.values() for row in rows]


def map_columns(batch: StepBatch) -> list[Tree]:
    """Copies of the columns: env_ids, obs, rewards, terminated, truncated, is_first."""
    return [map_tree(_copied, column) for column in batch[:6]]


def row_of(columns: Tree, row: int) -> Tree:
    """A copy of one row: a tree of arrays without the first axis."""
    return map_tree(lambda leaf: _copied(leaf[row : row + 1]).reshape(leaf.shape[1:]), columns)


def keys_of(columns: Tree) -> tuple[Any, ...]:
    """Equal for trees of arrays that are equal bit for bit (NaN too), those of objects included."""
    return tuple((path, _key(leaf)) for path, leaf in flatten(columns))


def _copied(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return copy.deepcopy(array) if array.dtype.hasobject else array.copy()


def _key(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.ndarray):
        return value.shape, [_key(part) for part in value.ravel()]
    if isinstance(value, np.generic):
        return value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        return [(key, _key(part)) for key, part in value.items()]
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [_key(part) for part in value]
    return type(value).__name__, value


@dataclass(frozen=True)
class Conditions:
    """What a rule is checked with; see :func:`check_base_env`."""

    make: Callable[[int], BaseEnv]
    seed: int = 0
    rounds: int = 30
    reference: Callable[[int], gymnasium.Env[Any, Any]] | None = None
    make_faulty: Callable[[int], BaseEnv] | None = None
    make_other: Callable[[int], BaseEnv] | None = None

    def played(self, make: Callable[[int], BaseEnv] | None = None, between: Any = None) -> Player:
        """A player that has played a fresh env, which is closed."""
        with (make or self.make)(self.seed) as env:
            return Player(env, self.seed).play(self.rounds, between)


def outcome_of(call: Callable[[], Any], limit_s: float) -> Any:
    """What the call returned or raised, or a text if it took too long."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(call())
        except BaseException as e:
            got.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return got[0] if got else f"no answer in {limit_s} s"
