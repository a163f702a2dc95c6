"""Cases 10, 16, 17 and 18 from the field, for served episodes."""

import gc
import tracemalloc

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlsample.env.serving.served_episode import ServingEnded
from rlsample.errors import SamplerError, ServingError
from rlsample.testing.scripted_policy import ScriptedPolicy
from tests.env.serving.conftest import Player, drained, rows_of

SPACES = (Box(0, 1e6, (1,), np.float32), Discrete(2))


def obs(value):
    return np.array([value], np.float32)


def player(play):
    return Player(play, spaces=SPACES)


MODES = [
    {"sample_async": False},
    {"sample_async": True},
    {"sample_async": False, "batch_mode": "complete_episodes"},
    {"sample_async": True, "sample_queue_full": "wait", "batch_mode": "complete_episodes"},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_case_16_ending_one_episode_leaves_the_others_alone(serve, mode):
    answers = []

    def play(env):
        for k in range(20):
            a = env.start_episode(f"a{k}")
            answers.append(env.get_action(obs(0), a, timeout_s=2))
            log = env.start_episode(f"l{k}")
            env.log_action(obs(100), 1, log)
            env.log_returns(5, episode_id=log)
            env.end_episode(obs(101), log)
            answers.append(env.get_action(obs(1), a, timeout_s=2))
            env.end_episode(obs(2), a)

    ev = serve(player(play), ScriptedPolicy, rollout_fragment_length=7, sample_queue_size=100, **mode)
    rows = list(rows_of(drained(ev)).values())
    assert answers == [0] * 40
    logged = [((100,), (101,), 1, 5.0, True, False, 0)]
    asked = [((0,), (1,), 0, 0.0, False, False, 0), ((1,), (2,), 0, 0.0, True, False, 1)]
    assert sorted(rows) == sorted([logged] * 20 + [asked] * 20)
    metrics = ev.get_metrics()
    assert sorted((m.episode_return, m.length) for m in metrics) == [(0.0, 2)] * 20 + [(5.0, 1)] * 20
    assert len({m.eps_id for m in metrics}) == 40


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_case_17_episodes_ended_before_any_action(serve, mode):
    misuse = []

    def play(env):
        first = env.start_episode()
        env.end_episode(obs(9), first)
        second = env.start_episode()
        env.log_returns(3, episode_id=second)
        env.end_episode(obs(9), second)
        for call in (lambda: env.end_episode(obs(9), second), lambda: env.get_action(obs(9), "nobody")):
            with pytest.raises(ServingError) as e:
                call()
            misuse.append(str(e.value))
        third = env.start_episode()
        assert env.get_action(obs(0)) == 0
        env.log_returns(1)
        assert env.get_action(obs(1)) == 0
        env.log_returns(2)
        env.end_episode(obs(2), third)

    ev = serve(player(play), ScriptedPolicy, sample_queue_size=9, **mode)
    rows = list(rows_of(drained(ev)).values())
    assert rows == [[((0,), (1,), 0, 1.0, False, False, 0), ((1,), (2,), 0, 2.0, True, False, 1)]]
    assert [(m.episode_return, m.length) for m in ev.get_metrics()] == [(3.0, 2)]
    assert "has ended" in misuse[0]
    assert "'nobody'" in misuse[1]


def causes(error):
    while error is not None:
        yield error
        error = error.__cause__


@pytest.mark.parametrize("sample_async", [False, True])
def test_case_18_a_run_that_raises(serve, workers, sample_async):
    def play(env):
        env.start_episode()
        env.get_action(obs(0))
        env.get_action(obs(1))
        raise ValueError("boom-42")

    ev = serve(player(play), ScriptedPolicy, rollout_fragment_length=50, sample_async=sample_async)
    for _ in range(2):  # and again, at once
        with pytest.raises((ServingEnded, SamplerError), match="boom-42") as e:
            workers(1)[0].do(ev.sample)
        assert any(isinstance(c, ValueError) and str(c) == "boom-42" for c in causes(e.value))


@pytest.mark.parametrize("sample_async", [False, True])
def test_case_18_a_run_that_returns_gives_its_rows_first(serve, workers, sample_async):
    def play(env):
        env.start_episode()
        env.get_action(obs(0))
        env.log_returns(4)
        env.get_action(obs(1))

    ev = serve(player(play), ScriptedPolicy, rollout_fragment_length=50, sample_async=sample_async)
    (worker,) = workers(1)
    batch = worker.do(ev.sample)
    assert rows_of([batch]) == {0: [((0,), (1,), 0, 4.0, False, False, 0)]}
    with pytest.raises((ServingEnded, SamplerError), match="serving thread Player has ended"):
        worker.do(ev.sample)


def test_case_18_one_id_twice_reaches_both_sides(serve, workers):
    def play(env):
        env.start_episode("x")
        env.start_episode("x")

    ev = serve(player(play), ScriptedPolicy)
    with pytest.raises(ServingEnded, match="'x' is open already") as e:
        workers(1)[0].do(ev.sample)
    assert isinstance(e.value.__cause__, ServingError)


def sizes_of(*objects):
    """The largest container that these objects hold themselves."""
    found = 0
    for thing in objects:
        names = list(getattr(thing, "__dict__", {})) + list(getattr(type(thing), "__slots__", ()))
        for name in names:
            value = getattr(thing, name, None)
            if isinstance(value, (list, dict, set)) or type(value).__name__ in ("deque", "OrderedDict"):
                found = max(found, len(value))
    return found


def test_case_10_nothing_is_kept_of_finished_episodes(serve):
    snapshots = []

    def play(env):
        for k in range(2500):
            env.start_episode(f"episode {k}")
            env.get_action(obs(0))
            env.end_episode(obs(1))

    ev = serve(player(play), ScriptedPolicy, rollout_fragment_length=100)
    ev.policy.seen = type("Nothing", (), {"append": lambda self, x: None})()
    episodes = 0
    tracemalloc.start()
    try:
        for batch in iter(lambda: drained_one(ev), None):
            episodes += len(ev.get_metrics())
            assert batch.count == 100
            if episodes in (1000, 2400):
                gc.collect()
                snapshots.append(tracemalloc.get_traced_memory()[0])
                desk = ev.env.env.desk
                parts = (ev, ev.sampler, ev.sampler.episodes, ev.sampler._buffer, ev.env, ev.env.env, desk)
                assert sizes_of(*parts, desk.registry, desk.inbox, desk.lanes) <= 100
                del parts  # else the buffer of now counts at the next look
    finally:
        tracemalloc.stop()
    assert episodes == 2500
    assert snapshots[1] - snapshots[0] < 36_000


def drained_one(ev):
    try:
        return ev.sample()
    except ServingEnded:
        return None
