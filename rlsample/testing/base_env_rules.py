"""The ten rules of a polled env, each as one function that raises ConformanceError.

from rlsample.env import as_base_env
from rlsample.testing import check_base_env
check_base_env(lambda seed: as_base_env(MyEnv, num_envs=3, seed=seed))
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsample.env.base_env import BaseEnv, slot_seed
from rlsample.env.spaces import ObsWriter, leaf_spec, nonfinite_rows, zeros_columns
from rlsample.errors import EnvProtocolError, SpaceError
from rlsample.testing.base_env_lifecycle import rule_8_failures, rule_9_same_again, rule_10_close
from rlsample.testing.base_env_player import (
    AT_ONCE_S,
    Conditions,
    ConformanceError,
    Player,
    keys_of,
    map_columns,
    outcome_of,
    row_of,
)
from rlsample.tree import Tree, leaves

__all__ = [
    "RULES",
    "check_base_env",
    "rule_1_first_rows",
    "rule_2_one_row_each",
    "rule_3_true_ends",
    "rule_4_wrong_slots",
    "rule_5_actions_in_space",
    "rule_6_own_arrays",
    "rule_7_columns",
]


def check_base_env(
    make: Callable[[int], BaseEnv], rules: Iterable[int] | None = None, **conditions: Any
) -> dict[int, str]:
    """Checks a BaseEnv against the ten rules of the polled interface.

    Args:
        make: ``make(seed) -> BaseEnv``, a fresh one each time; it is closed here. Three slots and episodes shorter than
            ``rounds`` show the most.
        rules: which; None: all.
        conditions: optional:
            ``seed`` (0), ``rounds`` (30): actions or resets per slot;
            ``reference(slot) -> gymnasium.Env``: the plain env of a slot; the final observations and flags must be its;
            ``make_faulty(seed) -> BaseEnv``: one of its slots (not all) fails within ``rounds``;
            ``make_other(seed) -> BaseEnv``: the same envs on another backend, which must play bit for bit alike.

    Returns:
        rule -> ``"ok"``, or what could not be checked and why.

    Raises:
        ConformanceError: the first rule that is broken.
    """
    given = Conditions(make, **conditions)
    return {rule: RULES[rule](given) or "ok" for rule in (sorted(RULES) if rules is None else rules)}


def rule_1_first_rows(given: Conditions) -> str:
    """The first row of each episode, and no other, has is_first; its reward is 0 and its flags are unset."""
    player = given.played()
    for row in player.all_rows():
        want = row.asked == "first"
        if row.is_first != want:
            raise ConformanceError(1, f"is_first of a {row.asked} row of slot {row.slot}", row.is_first, want)
        if want and (row.reward.any() or row.ended):
            got = f"reward {row.reward}, terminated {row.terminated}, truncated {row.truncated}"
            raise ConformanceError(1, f"a first row of slot {row.slot}", got, "reward 0 and no flag")
    return ""


def rule_2_one_row_each(given: Conditions) -> str:
    """One row per action or reset; nothing pending: poll raises at once and says which slots wait for what."""
    player = given.played()
    if player.surplus:
        raise ConformanceError(2, "rows that nobody asked for, by slot", player.surplus, "none")
    if player.lost:
        raise ConformanceError(2, "slots whose row never came", player.lost, "none")
    with given.make(given.seed) as env:
        player = Player(env, given.seed).play(0)
        _expect_nothing_pending(env)
        if env.num_envs > 1:
            player.send([0])
            if env.lockstep:
                _expect_nothing_pending(env)
                player.send(sorted(player.waiting))
            player.collect()
            got = [len(rows) for rows in player.rows.values()]
            want = [2] * env.num_envs if env.lockstep else [2] + [1] * (env.num_envs - 1)
            if got != want or player.surplus or player.lost:
                raise ConformanceError(2, "rows per slot after an action for slot 0 first", got, want)
    return ""


def _expect_nothing_pending(env: BaseEnv) -> None:
    outcome = outcome_of(env.poll, AT_ONCE_S)
    expected = "an EnvProtocolError that names the slots, at once"
    if not isinstance(outcome, EnvProtocolError) or "slot" not in str(outcome):
        raise ConformanceError(2, "a poll that has nothing to wait for", outcome, expected)


def rule_3_true_ends(given: Conditions) -> str:
    """The row that ends an episode has the true final observation; terminated and truncated are told apart."""
    player = given.played()
    ends = [row for row in player.all_rows() if row.ended]
    if given.reference is not None:
        for slot in sorted(set(player.rows) - set(player.lost)):
            _compare_ends(given, slot, player)
    elif ends:
        _compare_with_next_first(player)
    if not ends:
        return f"no episode ended in {given.rounds} rounds"
    return "" if given.reference is not None else "without a reference, only copies of the next first one are noticed"


def _compare_ends(given: Conditions, slot: int, player: Player) -> None:
    assert given.reference is not None
    env = given.reference(slot)
    column = zeros_columns(env.observation_space, (1,))
    writer = ObsWriter(env.observation_space, any_size=True)
    seed = slot_seed(given.seed, 0, slot)
    for row in player.rows[slot]:
        if row.asked == "first":
            env.reset(seed=seed)
            seed = None
            continue
        obs, _, terminated, truncated, _ = env.step(row.action)
        if (row.terminated, row.truncated) != (bool(terminated), bool(truncated)):
            got = f"terminated {row.terminated}, truncated {row.truncated}"
            raise ConformanceError(3, f"flags of slot {slot}", got, f"{bool(terminated)}, {bool(truncated)}")
        writer.write(column, 0, obs, slot, None)
        if row.ended and not _same(row.obs, row_of(column, 0)):
            raise ConformanceError(3, f"final observation of slot {slot}", row.obs, obs)
    env.close()


def _compare_with_next_first(player: Player) -> None:
    pairs = [(now, after) for rows in player.rows.values() for now, after in itertools.pairwise(rows) if now.ended]
    moves = any(not _same(a.obs, b.obs) for rows in player.rows.values() for a, b in itertools.pairwise(rows))
    if pairs and moves and all(_same(now.obs, after.obs) for now, after in pairs):
        got = f"{pairs[0][0].obs}, the first observation of the next episode, at each of {len(pairs)} ends"
        raise ConformanceError(3, "final observations", got, "the last ones of their own episodes")


def _same(a: Tree, b: Tree) -> bool:
    for x, y in zip(leaves(a), leaves(b), strict=True):
        kind = np.asarray(x).dtype.kind
        if (keys_of(x) != keys_of(y)) if kind == "O" else not np.array_equal(x, y, equal_nan=kind == "f"):
            return False
    return True


def rule_4_wrong_slots(given: Conditions) -> str:
    """Actions for an unknown, doubled, busy, ended or new slot raise EnvProtocolError; nothing is stepped."""
    with given.make(given.seed) as env:
        player = Player(env, given.seed)
        _refused(4, player, [0], "an action for slot 0 before the first poll", 0)
        player.play(1)
        if player.waiting:
            slot = min(player.waiting)
            player.send([slot])
            _refused(4, player, [slot], f"an action for slot {slot}, which is busy", slot)

    def disturb(player: Player) -> None:
        count = player.env.num_envs
        waiting = sorted(player.waiting)
        for unknown in (count, -1):
            _refused(4, player, [*waiting, unknown], f"an action for slot {unknown} of {count}", unknown)
        if waiting:
            _refused(4, player, [waiting[0], *waiting], f"two actions for slot {waiting[0]}", waiting[0])
        for slot in sorted(player.ended):
            _refused(4, player, [*waiting, slot], f"an action for slot {slot}, which ended", slot)

    return _undisturbed(4, given, disturb)


def _refused(rule: int, player: Player, slots: list[int], what: str, culprit: int) -> None:
    actions = player.legal([slot if 0 <= slot < player.env.num_envs else 0 for slot in slots])
    try:
        player.env.send_actions(np.array(slots), actions)
        got: Any = "no error"
    except EnvProtocolError as e:
        if re.search(rf"(?<![\d-]){culprit}\b", str(e)):
            return
        got = f"EnvProtocolError: {e}"
    except Exception as e:
        got = f"{type(e).__name__}: {e}"
    raise ConformanceError(rule, what, got, f"an EnvProtocolError that names slot {culprit}")


def _undisturbed(rule: int, given: Conditions, disturb: Callable[[Player], None]) -> str:
    """Plays with refused calls in between: the rows must be those of a game without, if two of those are alike."""
    disturbed, plain, again = given.played(between=disturb), given.played(), given.played()
    keys = [[[row.key() for row in rows] for rows in p.rows.values()] for p in (disturbed, plain, again)]
    if keys[1] != keys[2]:
        return "two games with one seed differ, so whether a refused call steps an env cannot be seen"
    if keys[0] != keys[1]:
        raise ConformanceError(rule, "rows after refused calls", "other rows than without them", "the same")
    return ""


def rule_5_actions_in_space(given: Conditions) -> str:
    """An action outside the space, or of another shape, raises SpaceError before it reaches an env."""

    def disturb(player: Player) -> None:
        slots = sorted(player.waiting)
        if not slots:
            return
        for what, actions in _bad_batches(player.env.action_space, player.legal(slots)):
            try:
                player.env.send_actions(np.array(slots), actions)
                got = "no error"
            except SpaceError:
                continue
            except Exception as e:
                got = f"{type(e).__name__}: {e}"
            raise ConformanceError(5, f"{what} in {player.env.action_space}", got, "a SpaceError")

    return _undisturbed(5, given, disturb)


def _bad_batches(space: gymnasium.Space[Any], good: Tree) -> list[tuple[str, Tree]]:
    """Batches with one thing wrong in the last row."""
    if isinstance(space, spaces.Dict):
        parts = [(k, s) for k, s in space.spaces.items()]
        return [(what, {**good, k: bad}) for k, s in parts for what, bad in _bad_batches(s, good[k])]
    if isinstance(space, spaces.Tuple):
        return [
            (what, (*good[:i], bad, *good[i + 1 :]))
            for i, s in enumerate(space.spaces)
            for what, bad in _bad_batches(s, good[i])
        ]
    out: list[tuple[str, Tree]] = [("one action too few", good[:-1]), ("a dimension too many", good[..., None])]
    above = good.copy()
    if isinstance(space, spaces.Discrete):
        above[-1] = space.start + space.n
    elif isinstance(space, spaces.MultiDiscrete):
        above[-1] = space.start + space.nvec
    elif isinstance(space, spaces.MultiBinary):
        above[-1] = 2
    elif good.dtype.kind == "f":
        above[-1] = np.nan
    elif good.dtype.kind == "O":
        above[-1] = object()
    else:
        return out
    return [*out, ("a value outside", above)]


def rule_6_own_arrays(given: Conditions) -> str:
    """Arrays that poll and try_reset returned never change later."""
    with given.make(given.seed) as env:
        player = Player(env, given.seed).play(given.rounds)
    for k, (batch, was) in enumerate(player.batches):
        for name, now, then in zip(batch._fields, map_columns(batch), was, strict=False):
            if not _same(now, then):
                raise ConformanceError(6, f"column {name} of batch {k}, looked at later", now, then)
    return ""


def rule_7_columns(given: Conditions) -> str:
    """Columns have K rows and their dtypes, observations those of the space; rewards and observations are finite."""
    with given.make(given.seed) as env:
        player = Player(env, given.seed).play(given.rounds)
        want_obs = [(spec.shape, spec.dtype) for spec in leaves(leaf_spec(env.observation_space))]
    for batch, _ in player.batches:
        count = len(batch.env_ids)
        obs = [(leaf.shape, leaf.dtype) for leaf in leaves(batch.obs)]
        want = [((count, *shape), dtype) for shape, dtype in want_obs]
        if obs != want:
            raise ConformanceError(7, "shapes and dtypes of the observations", obs, want)
        dtypes = {
            "env_ids": "int64",
            "rewards": "float32",
            "terminated": "bool",
            "truncated": "bool",
            "is_first": "bool",
        }
        for name, dtype in dtypes.items():
            column = getattr(batch, name)
            if column.shape != (count,) or column.dtype != dtype:
                raise ConformanceError(7, name, f"shape {column.shape} of {column.dtype}", f"({count},) of {dtype}")
        for name, column in (("rewards", batch.rewards), ("observations", batch.obs)):
            if nonfinite_rows(column):
                raise ConformanceError(7, f"{name} of slots {batch.env_ids.tolist()}", column, "finite numbers")
    return ""


RULES: dict[int, Callable[[Conditions], str]] = {
    1: rule_1_first_rows,
    2: rule_2_one_row_each,
    3: rule_3_true_ends,
    4: rule_4_wrong_slots,
    5: rule_5_actions_in_space,
    6: rule_6_own_arrays,
    7: rule_7_columns,
    8: rule_8_failures,
    9: rule_9_same_again,
    10: rule_10_close,
}
