"""The next row of each lane, as columns: clients write their values in place, the sampling thread gathers them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from rlsample.env.serving.episode_registry import CALL_ORDER
from rlsample.env.serving.served_episode import ASKED, LOGGED, QueuedRow
from rlsample.env.spaces import ActionCodec, ObsWriter, coerce_reward, empty_columns, nonfinite_rows, zeros_columns
from rlsample.errors import EnvFailedError, ServingError, SpaceError
from rlsample.tree import Tree, assign, gather, leaves

__all__ = ["MAX_REWARD", "LaneRows", "TakenRows", "checked_logp", "checked_reward"]

MAX_REWARD = float(np.finfo(np.float32).max)
_ONE = np.zeros(1, np.int64)
_FEW = 32  # numbers up to which a Python list beats a numpy call


class TakenRows(NamedTuple):
    """K rows gathered from their lanes: copies.

    Attributes:
        lanes: int64[K]; ``obs``, ``rewards`` as in a StepBatch; ``infos`` row -> info.
        kinds: int8[K], or None where all were asked.
        actions, logp: tree [K, ...] and float32[K] where some row was logged, else None.
    """

    lanes: np.ndarray
    obs: Tree
    rewards: np.ndarray
    infos: dict[int, dict[str, Any]]
    kinds: np.ndarray | None
    actions: Tree
    logp: np.ndarray | None


class LaneRows:
    """One row per lane, and the checks that a value passes before it gets there.

    Attributes:
        obs, actions: trees [lanes, ...] of the spaces; ``rewards``, ``logp`` float32[lanes]; ``kinds`` int8[lanes], 0
            (asked) but between a row of another kind and its poll; ``infos`` lane -> info, of rows that have one.
        plain: shape and dtype of observations that are one array, else (None, None): a caller may write those itself.
        allow_nonfinite: whether float observations may hold NaN and inf.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_lanes: int,
        allow_nonfinite: bool = False,
    ) -> None:
        self._observation_space, self._action_space = observation_space, action_space
        self._writer, self._codec = ObsWriter(observation_space), ActionCodec(action_space)
        self._action_writer = ObsWriter(action_space)
        self.obs: Tree = zeros_columns(observation_space, (num_lanes,))
        self.actions: Tree = zeros_columns(action_space, (num_lanes,))
        self.rewards = np.zeros(num_lanes, np.float32)
        self.logp = np.full(num_lanes, np.nan, np.float32)
        self.kinds = np.zeros(num_lanes, np.int8)
        self.infos: dict[int, dict[str, Any]] = {}
        self.plain = self._writer.shape, self._writer.dtype
        self.allow_nonfinite = allow_nonfinite

    def write_obs(self, lane: int, obs: Any, call: str) -> None:
        """Checks an observation and copies it into the lane's row.

        Raises:
            SpaceError: names what came and what was expected. The lane's row may be partly written.
        """
        self._write_obs(self.obs, lane, obs, call)

    def obs_copy(self, obs: Any, call: str) -> Tree:
        """The checked observation as a tree [1, ...] of its own. Raises as :meth:`write_obs`."""
        column = empty_columns(self._observation_space, (1,))
        self._write_obs(column, 0, obs, call)
        return column

    def _write_obs(self, columns: Tree, row: int, obs: Any, call: str) -> None:
        try:
            self._writer.write(columns, row, obs, 0, None)
        except EnvFailedError as e:
            raise SpaceError(f"{call}: {str(e).partition(': ')[2]}{_order_hint(obs, call)}") from e.__cause__
        if not self.allow_nonfinite:
            self.require_finite(gather(columns, slice(row, row + 1)), call)

    def quick_finite_check(self) -> Callable[[np.ndarray], bool]:
        """Whether an observation of one array, of the space's dtype, may pass; False may mean to look closer."""
        shape, dtype = self.plain
        if dtype is None or dtype.kind != "f" or self.allow_nonfinite:
            return _always
        return _finite_few if math.prod(shape or ()) <= _FEW and shape else _finite_many

    def require_finite(self, column: Tree, call: str) -> None:
        """Raises SpaceError if the float leaves of one observation [1, ...] hold NaN or inf."""
        for _, path, value in nonfinite_rows(column):
            where = f" at {path}" if path else ""
            raise SpaceError(f"{call}: the observation{where} holds {value}; mend it, or set allow_nonfinite=True")

    def action_copy(self, action: Any, obs: Any, call: str) -> Tree:
        """The checked action as a tree [1, ...] of its own; ``obs`` only for the message.

        Raises:
            SpaceError: names what came and the space.
        """
        column = empty_columns(self._action_space, (1,))
        try:
            self._action_writer.write(column, 0, action, 0, None)
        except EnvFailedError as e:
            text = str(e).partition(": ")[2].replace("observation", "action", 1)
            hint = _order_hint(obs, call)
            raise SpaceError(f"{call}: {text}; the action space is {self._action_space}{hint}") from e.__cause__
        try:
            self._codec.check(column, _ONE)
        except SpaceError as e:
            raise SpaceError(f"{call}: the action {action!r} is outside the space {self._action_space}") from e
        return column

    def write_queued(self, lane: int, row: QueuedRow) -> None:
        """A row that waited becomes the lane's row."""
        one = slice(lane, lane + 1)
        assign(self.obs, one, row.obs)
        self.write_outcome(lane, row.reward, row.info)
        if row.kind != ASKED:
            self.write_kind(lane, row.kind, row.action, row.logp)

    def write_outcome(self, lane: int, reward: float, info: dict[str, Any] | None) -> None:
        """What followed the lane's last action."""
        self.rewards[lane] = reward
        if info is not None:
            self.infos[lane] = info

    def write_kind(self, lane: int, kind: int, action: Tree = None, logp: float = math.nan) -> None:
        """The row logs an action (tree [1, ...]) or ends its episode."""
        self.kinds[lane] = kind
        if action is not None:
            assign(self.actions, slice(lane, lane + 1), action)
            self.logp[lane] = logp

    def take(self, lanes: list[int]) -> TakenRows:
        """The rows of distinct lanes, copied. Every kind is ASKED again."""
        at = np.array(lanes, np.int64)
        obs, rewards, kinds = gather(self.obs, at), self.rewards[at], self.kinds[at]
        infos: dict[int, dict[str, Any]] = {}
        if self.infos:
            infos = {row: self.infos.pop(lane) for row, lane in enumerate(lanes) if lane in self.infos}
        if kinds.tobytes().count(ASKED) == len(lanes):
            return TakenRows(at, obs, rewards, infos, None, None, None)
        self.kinds[at] = ASKED
        if LOGGED in kinds.tobytes():
            return TakenRows(at, obs, rewards, infos, kinds, gather(self.actions, at), self.logp[at])
        return TakenRows(at, obs, rewards, infos, kinds, None, None)

    def clear(self, lane: int) -> None:
        """Forgets the lane's row, which nobody will take."""
        self.kinds[lane] = ASKED
        self.infos.pop(lane, None)

    def holds(self, lane: int, obs: Tree) -> bool:
        """Whether the lane's row has this observation, a tree [1, ...], bit for bit."""
        return self.same(gather(self.obs, slice(lane, lane + 1)), obs)

    @staticmethod
    def same(a: Tree, b: Tree) -> bool:
        """Whether two trees of one structure are equal bit for bit."""
        return all(x.tobytes() == y.tobytes() for x, y in zip(leaves(a), leaves(b), strict=True))


def _always(obs: np.ndarray) -> bool:
    return True


def _finite_few(obs: np.ndarray) -> bool:
    return math.isfinite(sum(obs.ravel().tolist()))  # False may be an overflow: then the slow way looks closer


def _finite_many(obs: np.ndarray) -> bool:
    return math.isfinite(np.vdot(obs, obs))


def checked_reward(reward: Any) -> float:
    """A reward as a float.

    Raises:
        ServingError: it is no single finite number.
    """
    try:
        return coerce_reward(reward, 0, None)
    except EnvFailedError as e:
        text = str(e).partition(": ")[2].partition("; mend")[0]
        raise ServingError(f"log_returns: {text}{_order_hint(reward, 'log_returns')}") from e.__cause__


def checked_logp(logp: Any) -> float:
    """A log-probability as a float.

    Raises:
        SpaceError: it is no finite number.
    """
    try:
        value = float(logp)
    except (TypeError, ValueError):
        raise SpaceError(f"log_action: action_logp must be a number, got {logp!r}; {CALL_ORDER}") from None
    if not math.isfinite(value):
        raise SpaceError(f"log_action: action_logp is {value}; leave it out where it is unknown")
    return value


_ORDER = {
    "get_action": "get_action(obs, episode_id)",
    "log_action": "log_action(obs, action, episode_id)",
    "log_returns": "log_returns(reward, info, episode_id)",
    "end_episode": "end_episode(obs, episode_id)",
}


def _order_hint(first: Any, call: str) -> str:
    """Shown where a string came first: the order of RLlib's calls, which is not kept."""
    if not isinstance(first, str) or call not in _ORDER:
        return ""
    return f"; the episode_id does not come first here: call {_ORDER[call]}"
