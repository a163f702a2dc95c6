"""The conformance suite passes on every adapter, and each rule fails on an env that breaks it, and only that rule."""

import contextlib
import itertools
import multiprocessing
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlsample.env import BaseEnv, StepBatch, as_base_env
from rlsample.env.slot_states import BUSY, WAITING
from rlsample.errors import EnvFailedError, EnvProtocolError, SpaceError
from rlsample.testing import ConformanceError, CountEnv, CountVectorEnv, check_base_env
from rlsample.testing.base_env_rules import RULES
from rlsample.tree import map_tree

LENGTHS = (2, 3, 5)
ENDS = ("term", "trunc", "both")


@pytest.fixture(autouse=True, scope="module")
def shared_memory_arena():
    """multiprocessing keeps its first arena for reuse, which is no leak of the test that happened to be first."""
    multiprocessing.RawArray("b", 1 << 20)


class Random(CountEnv):
    """Draws its observations and lengths from its own rng, and takes a nested action."""

    observation_space = spaces.Dict({"x": spaces.Box(-9, 9, (2,), np.float32), "n": spaces.Discrete(9)})
    action_space = spaces.Tuple((spaces.Discrete(3, start=5), spaces.Box(-1, 1, (2,), np.float32)))

    def observe(self):
        return {"x": self.np_random.normal(size=2).astype(np.float32).clip(-9, 9), "n": int(self.np_random.integers(9))}

    def step(self, action):
        self.n = 1 + int(self.np_random.integers(6))
        obs, reward, *rest = super().step(action)
        if self.k > self.n:
            rest[0] = True
        return obs, reward + float(action[0]), *rest


class NotANumber(CountEnv):
    def observe(self):
        return np.array([np.nan if self.steps == 7 else self.k], np.float32)


class Raises(CountEnv):
    def step(self, action):
        if self.steps == 7:
            raise RuntimeError("broken leg")
        return super().step(action)


def of(slot):
    return CountEnv(LENGTHS[slot], ENDS[slot])


def faulty(slot, kind=NotANumber):
    return kind(99) if slot == 1 else of(slot)


class Mixed(CountVectorEnv):
    """CountVectorEnv whose slots end each in its own way, as ``of`` has it."""

    fault_at = None

    def __init__(self):
        super().__init__(LENGTHS)

    def vector_step(self, actions):
        obs, rewards, ended, _, infos = super().vector_step(actions)
        if self.steps == self.fault_at:
            rewards[1] = np.nan
        return obs, rewards, ended & [True, False, True], ended & [False, True, True], infos


def made_of(build, kind):
    """``make(seed)`` of a kind of BaseEnv over ``build(slot)``."""
    if kind == "loop":
        return lambda seed: as_base_env(lambda ctx: build(ctx.slot_index), 3, seed=seed)
    mode, _, form = kind.partition("-")
    venv = AsyncVectorEnv if form == "async" else SyncVectorEnv

    def make(seed):
        fns = [lambda slot=slot: build(slot) for slot in range(3)]
        return as_base_env(venv(fns, autoreset_mode=AutoresetMode[mode], copy=form == "copy"), seed=seed)

    return make


KINDS = ["loop", *(m.name for m in AutoresetMode), "NEXT_STEP-async", "SAME_STEP-async", "DISABLED-async"]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_gymnasium_envs_keep_every_rule(kind):
    got = check_base_env(
        made_of(of, kind),
        reference=of,
        make_faulty=made_of(faulty, kind),
        make_other=made_of(of, "loop"),
    )
    assert got == dict.fromkeys(range(1, 11), "ok")


@pytest.mark.parametrize("kind", KINDS)
def test_random_envs_with_nested_spaces_play_alike_on_every_adapter(kind):
    refusals = [] if kind.endswith("async") else [4, 5, 7]  # made before an env hears of it, wherever it runs
    got = check_base_env(
        made_of(lambda slot: Random(9), kind),
        [1, 2, 3, *refusals, 6, 9],
        make_other=made_of(lambda slot: Random(9), "loop"),
    )
    assert [rule for rule, said in got.items() if said != "ok"] == [3]


def test_vector_envs_keep_every_rule():
    def make_faulty(seed):
        venv = Mixed()
        venv.fault_at = 7
        return as_base_env(venv, seed=seed)

    got = check_base_env(
        lambda seed: as_base_env(Mixed(), seed=seed),
        reference=of,
        make_faulty=make_faulty,
        make_other=made_of(of, "loop"),
    )
    assert got == dict.fromkeys(range(1, 11), "ok")


@pytest.mark.parametrize(("env", "num_envs"), [("CartPole-v1", 3), ("CartPole-v1", 9), ("Pendulum-v1", 2)])
def test_three_lines_for_a_users_own_env(env, num_envs):
    got = check_base_env(lambda seed: as_base_env(env, num_envs, seed=seed))
    assert set(got) == set(range(1, 11))
    assert got[8] == "no make_faulty was given"


def test_a_loop_with_an_env_that_raises_keeps_rule_8():
    make = made_of(of, "loop")
    assert check_base_env(make, [8], make_faulty=made_of(lambda slot: faulty(slot, Raises), "loop")) == {8: "ok"}


# Broken envs


class Broken(BaseEnv):
    """A good env, to be spoiled in one way by a subclass."""

    made: list = []  # noqa: RUF012

    def __init__(self, env, kind):
        self.env, self.kind = env, kind
        self.num_envs, self.lockstep = env.num_envs, env.lockstep
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.polls = 0
        Broken.made.append(self)

    def spoil(self, batch: StepBatch) -> StepBatch:
        return batch

    def poll(self, timeout_s=None):
        self.polls += 1
        return self.spoil(self.env.poll(timeout_s))

    def send_actions(self, env_ids, actions):
        self.env.send_actions(env_ids, actions)

    def try_reset(self, env_ids):
        batch = self.env.try_reset(env_ids)
        return None if batch is None else self.spoil(batch)

    def try_restart(self, env_ids):
        self.env.try_restart(env_ids)

    def close(self):
        self.env.close()


class FirstNotTold(Broken):
    def spoil(self, batch):
        return batch._replace(is_first=np.zeros_like(batch.is_first))


class FirstToldTwice(Broken):
    def spoil(self, batch):
        return batch._replace(is_first=batch.is_first | (batch.obs[:, 0] == 1))


class FirstRewarded(Broken):
    def spoil(self, batch):
        return batch._replace(rewards=batch.rewards + batch.is_first.astype(np.float32))


class Doubled(Broken):
    def spoil(self, batch):
        if not len(batch.env_ids) or batch.is_first.any():
            return batch
        columns = [map_tree(lambda leaf: np.concatenate([leaf, leaf[:1]]), column) for column in batch[:6]]
        return StepBatch(*columns, batch.infos, batch.failures)


class Loses(Broken):
    def spoil(self, batch):
        if self.polls != 2 or len(batch.env_ids) < 3:
            return batch
        return StepBatch(*(map_tree(lambda leaf: leaf[1:], column) for column in batch[:6]), {}, batch.failures)


class EmptyPoll(Broken):
    def poll(self, timeout_s=None):
        try:
            return super().poll(timeout_s)
        except EnvProtocolError:
            no = np.zeros(0, bool)
            return StepBatch(np.zeros(0, np.int64), np.zeros((0, 1), np.float32), np.zeros(0, np.float32), no, no, no)


class WaitsForNothing(Broken):
    def poll(self, timeout_s=None):
        try:
            return super().poll(timeout_s)
        except EnvProtocolError:
            self.go_on = threading.Event()
            self.go_on.wait(60)
            raise

    def close(self):
        if hasattr(self, "go_on"):
            self.go_on.set()
        super().close()


class SaysNothing(Broken):
    def poll(self, timeout_s=None):
        try:
            return super().poll(timeout_s)
        except EnvProtocolError:
            raise EnvProtocolError("nothing to do") from None


class Ghost(Broken):
    """Hands out the next episode's first observation at the end."""

    def spoil(self, batch):
        obs = batch.obs.copy()
        obs[batch.terminated | batch.truncated] = 0
        return batch._replace(obs=obs)


class OneFlag(Broken):
    def spoil(self, batch):
        return batch._replace(terminated=batch.terminated | batch.truncated, truncated=np.zeros_like(batch.truncated))


class NotBoth(Broken):
    def spoil(self, batch):
        return batch._replace(truncated=batch.truncated & ~batch.terminated)


class Swallows(Broken):
    def send_actions(self, env_ids, actions):
        with contextlib.suppress(EnvProtocolError):
            super().send_actions(env_ids, actions)


class StepsAnyway(Broken):
    """Steps the first slot of a refused call."""

    def send_actions(self, env_ids, actions):
        try:
            super().send_actions(env_ids, actions)
        except EnvProtocolError:
            slot = int(env_ids[0])
            if 0 <= slot < 3 and self.env._states.code[slot] == WAITING and BUSY not in self.env._states.code:
                self.env.sub_envs()[slot].step(0)
            raise


class NamesNoSlot(Broken):
    def send_actions(self, env_ids, actions):
        try:
            super().send_actions(env_ids, actions)
        except EnvProtocolError:
            raise EnvProtocolError("bad slot") from None


class TakesAnyAction(Broken):
    def send_actions(self, env_ids, actions):
        with contextlib.suppress(SpaceError):
            super().send_actions(env_ids, actions)


class WrongError(Broken):
    def send_actions(self, env_ids, actions):
        try:
            super().send_actions(env_ids, actions)
        except SpaceError as e:
            raise KeyError(str(e)) from e


class StepsBadActions(Broken):
    def send_actions(self, env_ids, actions):
        try:
            super().send_actions(env_ids, actions)
        except SpaceError:
            self.env.sub_envs()[int(env_ids[0])].step(0)
            raise


class OneObsBuffer(Broken):
    def spoil(self, batch):
        self.buffer = getattr(self, "buffer", np.zeros((3, 1), np.float32))
        self.buffer[: len(batch.obs)] = batch.obs
        return batch._replace(obs=self.buffer[: len(batch.obs)])


class OneFlagBuffer(Broken):
    def spoil(self, batch):
        self.buffer = getattr(self, "buffer", np.zeros(3, bool))
        self.buffer[: len(batch.obs)] = batch.terminated
        return batch._replace(terminated=self.buffer[: len(batch.obs)])


class DoubleRewards(Broken):
    def spoil(self, batch):
        return batch._replace(rewards=batch.rewards.astype(np.float64))


class RewardColumn(Broken):
    def spoil(self, batch):
        return batch._replace(rewards=batch.rewards[:, None])


class UpCast(Broken):
    def spoil(self, batch):
        return batch._replace(obs=batch.obs.astype(np.float64))


class NoNumberReward(Broken):
    def spoil(self, batch):
        return batch._replace(rewards=np.where(batch.rewards == 3, np.float32(np.nan), batch.rewards))


class RaisesFailures(Broken):
    def spoil(self, batch):
        for failure in batch.failures.values():
            raise failure
        return batch


class FailsNamelessly(Broken):
    def spoil(self, batch):
        return batch._replace(failures={slot: RuntimeError(str(f)) for slot, f in batch.failures.items()})


class RowOfTheFailed(Broken):
    def spoil(self, batch):
        if not batch.failures:
            return batch
        ids = np.append(batch.env_ids, list(batch.failures))
        columns = [map_tree(lambda leaf: np.concatenate([leaf, leaf[:1]]), column) for column in batch[1:6]]
        return StepBatch(ids, *columns, {}, batch.failures)


class AllFail(Broken):
    def spoil(self, batch):
        if not batch.failures:
            return batch
        failures = {slot: EnvFailedError("x", slot=slot) for slot in range(3)}
        return StepBatch(*(map_tree(lambda leaf: leaf[:0], column) for column in batch[:6]), {}, failures)


class RestartsAll(Broken):
    def try_restart(self, env_ids):
        pass


class UsesGlobalRng(Broken):
    def spoil(self, batch):
        np.random.random()
        return batch


class NeverTheSame(Broken):
    count = itertools.count()

    def __init__(self, *args):
        super().__init__(*args)
        self.mine = next(self.count)

    def spoil(self, batch):
        return batch._replace(rewards=np.where(batch.is_first, 0, batch.rewards + self.mine).astype(np.float32))


class ClosesOnce(Broken):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


class NeverCloses(Broken):
    def close(self):
        pass


class LeavesAThread(Broken):
    def __init__(self, *args):
        super().__init__(*args)
        self.go_on = threading.Event()
        threading.Thread(target=self.go_on.wait, args=(60,)).start()


BROKEN = {
    1: [FirstNotTold, FirstToldTwice, FirstRewarded],
    2: [Doubled, Loses, EmptyPoll, WaitsForNothing, SaysNothing],
    3: [Ghost, OneFlag, NotBoth],
    4: [Swallows, StepsAnyway, NamesNoSlot],
    5: [TakesAnyAction, WrongError, StepsBadActions],
    6: [OneObsBuffer, OneFlagBuffer],
    7: [DoubleRewards, RewardColumn, UpCast, NoNumberReward],
    8: [RaisesFailures, FailsNamelessly, RowOfTheFailed, AllFail, RestartsAll],
    9: [UsesGlobalRng, NeverTheSame],
    10: [ClosesOnce, NeverCloses, LeavesAThread],
}


@pytest.fixture(autouse=True)
def really_closed():
    Broken.made.clear()
    yield
    for env in Broken.made:
        env.env.close()
        if hasattr(env, "go_on"):
            env.go_on.set()
    Broken.made.clear()


@pytest.mark.parametrize(("rule", "cls"), [(rule, cls) for rule, found in BROKEN.items() for cls in found])
def test_a_broken_env_fails_its_rule_and_no_other(rule, cls):
    good, bad = made_of(of, "loop"), made_of(faulty, "loop")
    broken = {}
    for number in RULES:
        try:
            check_base_env(
                lambda seed: cls(good(seed), "good"),
                [number],
                rounds=12,
                reference=of,
                make_faulty=lambda seed: cls(bad(seed), "faulty"),
            )
        except ConformanceError as e:
            broken[number] = e.rule, f"rule {number}: " in str(e)
    assert broken == {rule: (rule, True)}


def test_ghosts_are_noticed_without_a_reference():
    good = made_of(of, "loop")
    with pytest.raises(ConformanceError, match="first observation of the next episode"):
        check_base_env(lambda seed: Ghost(good(seed), ""), [3])


def test_a_lockstep_env_must_refuse_a_part():
    good = made_of(of, "NEXT_STEP")
    with pytest.raises(ConformanceError, match="rule 2: a poll that has nothing to wait for"):
        check_base_env(lambda seed: EmptyPoll(good(seed), ""), [2])


def test_another_backend_that_plays_otherwise_is_noticed():
    with pytest.raises(ConformanceError, match="rule 9: row 2 of slot 0 on the other backend"):
        check_base_env(made_of(of, "loop"), [9], make_other=made_of(lambda slot: CountEnv(9), "loop"))


def test_what_could_not_be_checked_is_said():
    make = made_of(lambda slot: CountEnv(99, "never"), "loop")
    assert check_base_env(make, [3], rounds=5) == {3: "no episode ended in 5 rounds"}


def test_the_suite_leaves_the_envs_own_action_space_alone():
    env = CountEnv()
    env.action_space = spaces.Discrete(100)
    env.action_space.seed(1)
    want = gymnasium.spaces.Discrete(100, seed=1).sample()
    check_base_env(lambda seed: as_base_env(env, seed=seed), [1])
    assert env.action_space.sample() == want
