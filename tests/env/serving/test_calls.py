"""The five calls: what they check, what they raise in the caller, and that a refused call has changed nothing."""

import threading

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from rlsample.env import ServingEnv, ServingSettings
from rlsample.env.serving import ServingEnvAdapter
from rlsample.env.serving.inbox import Inbox
from rlsample.errors import ConfigError, ServingError, SpaceError
from tests.env.serving.conftest import LIMIT_S, OBS_SPACE, Player, answer, at, drained, outcome, rows_of

UP_TO_HALF = ServingSettings(timeout_s=0.05)


@pytest.fixture
def env():
    """An env that nobody samples."""
    return Player(settings=UP_TO_HALF)


def test_ids_are_made_or_taken(env):
    made = [env.start_episode() for _ in range(2)]
    assert len(set(made)) == 2
    assert env.start_episode("mine") == "mine"
    assert env.open_episodes == [*made, "mine"]
    env.end_episode(at(0, 0), "mine")
    assert env.open_episodes == made
    assert env.start_episode("mine") == "mine", "an id is free again after the end"


@pytest.mark.parametrize("bad", ["", 7, b"x"])
def test_ids_are_texts(env, bad):
    with pytest.raises(ServingError, match="non-empty str"):
        env.start_episode(bad)
    assert env.open_episodes == []


def test_the_id_may_be_left_out_while_the_thread_has_one_episode(env, workers):
    with pytest.raises(ServingError, match=r"no open episode: call start_episode"):
        env.log_returns(1)
    one = env.start_episode("one")
    env.log_returns(1)
    (other,) = workers(1)
    with pytest.raises(ServingError, match="this thread has no open episode"):
        other.do(lambda: env.log_returns(1))
    env.start_episode("two")
    with pytest.raises(ServingError, match=r"2 open episodes \('one', 'two'\): pass the episode_id"):
        env.log_returns(1)
    other.do(lambda: env.end_episode(at(0, 0), one))
    env.log_returns(1)  # "two" is the only one left
    env.end_episode(at(0, 0))
    with pytest.raises(ServingError, match=r"no open episode \(its last one, 'two', has ended\)"):
        env.log_returns(1)


@pytest.mark.parametrize(
    ("episode_id", "message"),
    [("nobody", "never started here, or ended long ago"), ("done", "'done' has ended"), (4, "must be a str, got int")],
)
def test_episodes_that_are_not_there(env, episode_id, message):
    env.start_episode("done")
    env.end_episode(at(0, 0), "done")
    calls = [
        lambda: env.get_action(at(0, 0), episode_id),
        lambda: env.log_action(at(0, 0), 1, episode_id),
        lambda: env.log_returns(1, episode_id=episode_id),
        lambda: env.end_episode(at(0, 0), episode_id),
        lambda: env.request_action(at(0, 0), episode_id, print),
    ]
    for call in calls:
        with pytest.raises(ServingError, match=message):
            call()


def test_a_late_call_on_an_id_made_here_is_told_that_it_ended_however_long_ago(env):
    first = env.start_episode()
    env.end_episode(at(0, 0))
    for k in range(200):
        env.start_episode(f"{k}")
        env.end_episode(at(0, 0))
    with pytest.raises(ServingError, match=f"{first!r} has ended"):
        env.log_returns(1, episode_id=first)
    with pytest.raises(ServingError, match="'199' has ended"):
        env.log_returns(1, episode_id="199")
    with pytest.raises(ServingError, match="there is no episode '0'"):
        env.log_returns(1, episode_id="0")
    number = int(first.split("-")[1])
    with pytest.raises(ServingError, match="never started"):
        env.log_returns(1, episode_id=first.replace(f"-{number}", "-999"))


def test_calls_in_the_order_of_the_original_show_the_new_one(env, workers):
    env.start_episode("e")
    info = {"a": 1}
    calls = [
        (lambda: env.get_action("e", at(0, 0)), r"get_action\(obs, episode_id\)"),
        (lambda: env.log_action("e", at(0, 0), 1), r"log_action\(obs, action, episode_id\)"),
        (lambda: env.log_returns("e", 1.0), r"log_returns\(reward, info, episode_id\)"),
        (lambda: env.log_returns("e", 1.0, info), r"log_returns\(reward, info, episode_id\)"),
        (lambda: env.end_episode("e", at(0, 0)), r"end_episode\(obs, episode_id\)"),
    ]
    for call, message in calls:
        with pytest.raises((ServingError, SpaceError), match=message):
            call()
        with pytest.raises((ServingError, SpaceError), match=message):
            workers(1)[0].do(call)  # from a thread without an episode of its own too


NESTED = Dict({"x": Box(-1, 1, (2,), np.float32), "n": Discrete(4)})
GOOD = {"x": np.zeros(2, np.float32), "n": 3}


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (OBS_SPACE, np.zeros(3, np.float32), r"shape \(3,\) of float32, expected shape \(2,\) of float32"),
        (OBS_SPACE, np.zeros((1, 2), np.float32), r"shape \(1, 2\)"),
        (OBS_SPACE, np.array([1, np.nan], np.float32), "holds nan"),
        (OBS_SPACE, [1.0, np.inf], "holds inf"),
        (OBS_SPACE, None, "NoneType"),
        (OBS_SPACE, {"x": 1}, "dict"),
        (Box(0, 255, (2,), np.uint8), np.zeros(2, np.float32), "of float32, expected"),
        (Box(0, 255, (2,), np.uint8), [0, 256], "up to 256"),
        (NESTED, {"x": GOOD["x"]}, r"keys \['x'\]"),
        (NESTED, {**GOOD, "x": np.array([0, np.nan], np.float32)}, "at x holds nan"),
    ],
)
def test_observations_are_checked_in_the_caller(space, obs, message):
    env = Player(spaces=(space, Discrete(2)), settings=UP_TO_HALF)
    episode = env.start_episode()
    calls = [
        ("get_action", lambda: env.get_action(obs)),
        ("log_action", lambda: env.log_action(obs, 1)),
        ("end_episode", lambda: env.end_episode(obs)),
        ("get_action", lambda: env.request_action(obs, episode, print)),
    ]
    for name, call in calls:
        with pytest.raises(SpaceError, match=message) as e:
            call()
        assert str(e.value).startswith(f"{name}: ")
    assert env.open_episodes == [episode]
    assert not env.desk.inbox.ready
    assert not env.desk.asking


def test_nonfinite_observations_pass_where_allowed(serve):
    def play(env):
        env.start_episode()
        env.log_action([np.nan, np.inf], 1)
        env.end_episode(at(0, 0))

    ev = serve(play, settings=ServingSettings(allow_nonfinite=True))
    (batch,) = drained(ev)
    assert np.array_equal(batch["obs"], np.array([[np.nan, np.inf]], np.float32), equal_nan=True)


def test_large_but_finite_numbers_are_no_nan(serve):
    big = np.full(2, 3e38, np.float32)

    def play(env):
        env.start_episode()
        env.get_action(big)
        env.end_episode(-big)

    (batch,) = drained(serve(play))
    assert batch["obs"].tolist() == [big.tolist()]
    assert batch["next_obs"].tolist() == [(-big).tolist()]


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (Discrete(3), 3, "outside the space"),
        (Discrete(3), -1, "outside the space"),
        (Discrete(3), 0.5, "float64"),
        (Discrete(3), [1], "shape"),
        (Discrete(3), None, "NoneType"),
        (Box(-1, 1, (2,), np.float32), np.zeros(3, np.float32), r"shape \(3,\)"),
        (Box(-1, 1, (2,), np.float32), np.array([0, 2], np.float32), "outside the space"),
        (Box(-1, 1, (2,), np.float32), np.array([0, np.nan], np.float32), "outside the space"),
    ],
)
def test_logged_actions_are_checked_in_the_caller(space, action, message):
    env = Player(spaces=(OBS_SPACE, space))
    env.start_episode()
    with pytest.raises(SpaceError, match=message) as e:
        env.log_action(at(0, 0), action)
    assert "log_action: " in str(e.value)
    assert not env.desk.inbox.ready


@pytest.mark.parametrize("logp", [np.nan, np.inf, "x", [0.0, 0.0]])
def test_log_probabilities_are_finite_numbers(env, logp):
    env.start_episode()
    with pytest.raises(SpaceError, match="action_logp"):
        env.log_action(at(0, 0), 1, action_logp=logp)


@pytest.mark.parametrize("reward", [np.nan, -np.inf, "1", None, [1.0, 2.0], np.zeros(2), 1e39, 1j])
def test_rewards_are_finite_float32_numbers(serve, reward):
    def play(env):
        env.start_episode()
        env.get_action(at(0, 0))
        env.log_returns(2)
        with pytest.raises(ServingError, match="log_returns: "):
            env.log_returns(reward)
        env.log_returns(np.array([3]))
        env.end_episode(at(0, 1))

    (batch,) = drained(serve(play))
    assert batch["rewards"].tolist() == [5.0]


def test_a_sum_of_rewards_may_not_overflow(env):
    env.start_episode()
    env.log_action(at(0, 0), 0)
    env.log_returns(3e38)
    with pytest.raises(ServingError, match="no finite float32"):
        env.log_returns(3e38)


def test_other_arguments_are_checked(env):
    env.start_episode()
    with pytest.raises(ServingError, match="info must be a dict, got float"):
        env.log_returns(1.0, 2.0)
    with pytest.raises(ServingError, match="truncated must be a bool, got int"):
        env.end_episode(at(0, 0), truncated=1)
    assert len(env.open_episodes) == 1


def test_every_form_of_reward_is_alike(serve):
    def play(env):
        env.start_episode()
        for k, reward in enumerate((1, 1.0, np.float64(1), np.array([1.0]), np.array(1), True)):
            env.get_action(at(0, k))
            env.log_returns(reward)
        env.end_episode(at(0, 6))

    rows = rows_of(drained(serve(play)))
    assert [row[3] for row in rows[0]] == [1.0] * 6


# ---------------------------------------------------------------------- places


def test_a_full_env_lets_start_wait(env, workers):
    ids = [env.start_episode() for _ in range(4)]
    (worker,) = workers(1)
    with pytest.raises(ServingError, match=r"no place after 0\.05 s: 4 of 4 episodes are open"):
        env.start_episode()
    waiting = worker.begin(lambda: env.start_episode("fifth", timeout_s=LIMIT_S))
    env.end_episode(at(0, 0), ids[2])
    assert waiting["done"].wait(LIMIT_S)
    assert waiting["result"] == "fifth"


def test_a_full_env_refuses_where_so_set():
    env = Player(max_concurrent=2, settings=ServingSettings(when_full="error"))
    first, _ = env.start_episode(), env.start_episode()
    with pytest.raises(ServingError, match="2 episodes are open, which is max_concurrent"):
        env.start_episode()
    env.end_episode(at(0, 0), first)
    env.start_episode()


def test_an_ended_episode_leaves_its_place_when_it_was_sampled(serve):
    """With one place, each start has to wait for the end before it to be sampled."""

    def play(env):
        for k in range(30):
            env.start_episode()
            assert env.get_action(at(k, 0)) == answer(k, 0)
            env.end_episode(at(k, 1))

    ev = serve(play, max_concurrent=1, settings=ServingSettings(when_full="error"))
    rows = rows_of(drained(ev))
    assert [row[0] for rows in rows.values() for row in rows] == [(k, 0) for k in range(30)]


# ---------------------------------------------------------------------- one call at a time, answers in time


def test_an_unanswered_question_stands(env):
    env.start_episode("e")
    with pytest.raises(ServingError, match=r"no answer for episode 'e' in 0\.05 s; is sample\(\) being called"):
        env.get_action(at(1, 0))
    for call in (
        lambda: env.log_returns(1),
        lambda: env.log_action(at(1, 1), 0),
        lambda: env.get_action(at(1, 1)),
        lambda: env.request_action(at(1, 0), "e", print),
    ):
        with pytest.raises(ServingError, match="'e' waits for the answer to another get_action"):
            call()
    assert len(env.desk.inbox.ready) == 1


def test_a_repeated_question_gets_the_one_answer(env, workers):
    """Given up before it was polled, between poll and answer, and after the answer."""
    (client,) = workers(1)

    def give_up(step):
        with pytest.raises(ServingError, match="no answer"):
            client.do(lambda: env.get_action(at(7, step), timeout_s=0.01))

    with ServingEnvAdapter(env) as adapter:
        client.do(env.start_episode)
        give_up(0)
        batch = adapter.poll()
        assert batch.obs.tolist() == [[7, 0]]
        give_up(0)
        again = client.begin(lambda: env.get_action(at(7, 0), timeout_s=LIMIT_S))
        adapter.send_actions(batch.env_ids, np.array([2]))
        assert outcome(again) == 2

        client.do(lambda: env.log_returns(5))
        give_up(1)
        batch = adapter.poll()
        assert batch.rewards.tolist() == [5]
        adapter.send_actions(batch.env_ids, np.array([1]))
        with pytest.raises(ServingError, match="waits for the answer to another"):
            client.do(lambda: env.get_action(at(7, 2)))
        assert client.do(lambda: env.get_action(at(7, 1))) == 1
        client.do(lambda: env.log_returns(6))
        client.do(lambda: env.end_episode(at(7, 2)))
        batch = adapter.poll()
        assert (batch.rewards.tolist(), batch.terminated.tolist()) == ([6], [True])


def test_an_episode_ended_while_its_question_stands_is_cut_there(serve, workers):
    gone = threading.Event()

    def play(env):
        env.start_episode()
        env.get_action(at(1, 0))
        env.log_returns(5)
        gone.wait(LIMIT_S)
        with pytest.raises(ServingError, match="no answer"):
            env.get_action(at(1, 1), timeout_s=0.01)
        env.end_episode(at(1, 9))
        with pytest.raises(ServingError, match="no open episode"):
            env.get_action(at(1, 9))

    ev = serve(play, rollout_fragment_length=1)
    gone.set()
    rows = rows_of(drained(ev))
    assert [row[:4] for row in rows[0]] == [((1, 0), (1, 1), answer(1, 0), 5.0)]


def test_one_episode_takes_one_call_at_a_time(env, workers):
    env = Player(settings=ServingSettings(timeout_s=LIMIT_S))
    env.start_episode("e")
    one, two = workers(2)
    waiting = one.begin(lambda: env.get_action(at(0, 0), "e"))
    while not env.desk.asking:  # until the question is posed
        pass
    for call in (
        lambda: env.get_action(at(0, 0), "e"),
        lambda: env.log_action(at(0, 0), 1, "e"),
        lambda: env.log_returns(1, episode_id="e"),
        lambda: env.end_episode(at(0, 0), "e"),
    ):
        with pytest.raises(ServingError, match="'e' is in use by another thread"):
            two.do(call)
    env.desk.stop("enough")
    assert waiting["done"].wait(LIMIT_S)
    with pytest.raises(ServingError, match="enough"):
        raise waiting["error"]


def test_request_action_calls_back_with_the_action_or_an_error(serve):
    got = []
    heard = threading.Event()

    def hear(value):
        got.append(value)
        heard.set()

    def play(env):
        episode = env.start_episode()
        for k in range(3):
            env.request_action(at(5, k), episode, hear)
            with pytest.raises(ServingError, match=r"waits for the answer|in use"):
                env.log_returns(1)
            assert heard.wait(LIMIT_S)
            heard.clear()
            env.log_returns(k)
        assert env.get_action(at(5, 3)) == answer(5, 3), "the plain form works after it"
        env.end_episode(at(5, 4))

    rows = rows_of(drained(serve(Player(play, settings=ServingSettings(max_wait_us=2e5)))))
    assert got == [answer(5, k) for k in range(3)]
    assert [row[3] for row in rows[0]] == [0, 1, 2, 0]


def test_request_action_is_told_when_serving_ends(env):
    got = []
    env.start_episode("e")
    env.request_action(at(0, 0), "e", got.append)
    env.desk.stop("the end")
    assert isinstance(got[0], ServingError)
    assert "the end" in str(got[0])
    assert len(got) == 1


def test_a_question_posed_while_serving_ends_is_not_left_waiting():
    env = Player()
    env.start_episode()
    episode = env.desk.registry.find(None)
    env.desk.stop("the end")  # after the call found its episode
    with pytest.raises(ServingError, match="the end"):
        env.desk.ask(episode, at(0, 0), LIMIT_S)
    assert not env.desk.asking


def test_an_end_that_is_sampled_at_once_leaves_nothing_open():
    """The sampling thread may take the final row, and free its lane, before end_episode has returned."""

    class Eager(Inbox):
        def put(self, episode):
            super().put(episode)
            batch = adapter.poll(timeout_s=0.0)
            if batch.terminated.any():
                adapter.try_reset(batch.env_ids)
                again.append(env.start_episode("e"))
            else:
                adapter.send_actions(batch.env_ids, np.zeros(1, np.int64))

    env, again = Player(max_concurrent=1), []
    env.desk.inbox = Eager()
    with ServingEnvAdapter(env) as adapter:
        env.start_episode("e")
        env.log_action(at(0, 0), 0)
        env.end_episode(at(0, 1))
        assert again == ["e"]
        assert env.open_episodes == ["e"]
        env.log_returns(1)


# ---------------------------------------------------------------------- the inbox


def test_waiting_sees_what_was_put_before(workers):
    inbox = Inbox()
    inbox.put("episode")
    for wait in (inbox.wait, lambda entries, time_s: inbox.park(time_s)):
        assert workers(1)[0].do(lambda wait=wait: wait(1, 60.0)) is None
    inbox.ring()
    inbox.ring()  # rings already
    assert workers(1)[0].do(lambda: inbox.wait(2, 60.0)) is None


def test_the_last_one_that_is_waited_for_rings(workers):
    inbox = Inbox()
    (waiter,) = workers(1)
    waiting = waiter.begin(lambda: inbox.wait(3, 60.0))
    inbox.put(1)
    inbox.put(2)
    assert not waiting["done"].wait(0.05)
    inbox.put(3)
    outcome(waiting)


def test_a_turn_is_taken_only_while_the_sampling_thread_is_parked(workers):
    inbox, turns, go_on = Inbox(), [], [True, True, False]
    (waiter,) = workers(1)
    inbox.lend_turns(lambda: turns.append(inbox.ready.popleft()), lambda: go_on.pop(0))
    inbox.put_and_work("nobody is parked")
    assert list(inbox.ready) == ["nobody is parked"]
    inbox.ready.clear()
    parked = waiter.begin(lambda: inbox.park(60.0))
    while not inbox._parked.acquire(False):
        pass
    inbox._parked.release()
    for k in range(2):
        inbox.put_and_work(k)
        assert turns[k:] == [k]
    assert not parked["done"].wait(0.05)
    inbox.put_and_work(2)
    outcome(parked)
    assert inbox.was_called()
    assert not inbox.was_called()


@pytest.mark.parametrize("error", [ValueError("a"), KeyboardInterrupt()])
def test_what_a_turn_raises_is_told_to_the_sampling_thread(workers, error):
    def fail():
        raise error

    inbox = Inbox()
    inbox.lend_turns(fail)
    (waiter,) = workers(1)
    parked = waiter.begin(lambda: inbox.park(60.0))
    while not inbox._parked.acquire(False):
        pass
    inbox._parked.release()
    if isinstance(error, Exception):
        inbox.put_and_work("x")
    else:
        with pytest.raises(KeyboardInterrupt):
            inbox.put_and_work("x")
    outcome(parked)
    with pytest.raises(type(error)):
        inbox.was_called()


# ---------------------------------------------------------------------- construction


def test_spaces_and_numbers_are_checked_at_once():
    with pytest.raises(ConfigError, match="max_concurrent"):
        Player(max_concurrent=0)
    with pytest.raises(ConfigError, match="max_concurrent"):
        Player(max_concurrent=True)
    with pytest.raises(SpaceError, match="observation space"):
        ServingEnv(Dict({}), Discrete(2))
    with pytest.raises(SpaceError, match="action space"):
        ServingEnv(OBS_SPACE, Dict({}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when_full": "eror"}, "did you mean 'error'"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_queued_rows": None}, "max_queued_rows"),
        ({"max_queued_rows": 1.5}, "max_queued_rows"),
        ({"max_wait_us": -1}, "max_wait_us"),
        ({"max_wait_us": float("nan")}, "max_wait_us"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"idle_timeout_s": 0}, "idle_timeout_s"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        ServingSettings(**options)


def test_one_env_serves_one_evaluator(serve):
    env = Player()
    serve(env)
    with pytest.raises(ConfigError, match="serves another evaluator"):
        serve(env)


# ---------------------------------------------------------------------- hostile names and times


def test_an_own_id_that_looks_like_the_next_one_made_here_is_nobody_elses():
    """Somebody reads the pattern off an id and names episodes after it: none may be taken over or lost."""
    env = Player(max_concurrent=6)
    prefix = env.start_episode().removesuffix("1")
    own = [env.start_episode(f"{prefix}{number}") for number in (4, 5, 6)]
    made = [env.start_episode() for _ in range(2)]
    assert len({*own, *made}) == 5
    assert sorted(env.open_episodes) == sorted([f"{prefix}1", *own, *made])
    for episode in env.open_episodes:
        env.end_episode(at(0, 0), episode)
    assert [env.start_episode() for _ in range(6)]  # every lane is free again


def test_any_time_is_a_time_to_wait(serve, workers):
    """Infinity, and less than nothing: locks take neither."""
    (client,) = workers(1)
    forever = ServingSettings(timeout_s=float("inf"), max_wait_us=float("inf"), max_queued_rows=1)
    ev = serve(Player(settings=forever, max_concurrent=1), sample_async=True)
    env = ev.env.env
    env.start_episode("x", timeout_s=float("inf"))
    for timeout_s in (-1, -0.5, 0):
        with pytest.raises(ServingError, match=r"no answer for episode 'x' in 0\.0 s"):
            env.get_action(at(1, 0), "x", timeout_s=timeout_s)
        with pytest.raises(ServingError, match="no place after"):
            env.start_episode("y", timeout_s=timeout_s)
    for timeout_s in (float("nan"), "soon"):
        with pytest.raises(ServingError, match="timeout_s must be a number of seconds"):
            env.get_action(at(1, 0), "x", timeout_s=timeout_s)
        with pytest.raises(ServingError, match="timeout_s must be a number of seconds"):
            env.start_episode("y", timeout_s=timeout_s)

    def play():
        first = env.get_action(at(1, 0), "x", timeout_s=float("inf")), env.get_action(at(1, 1), "x")
        for k in range(2, 5):
            env.log_action(at(1, k), 0, "x")  # waits for room
        env.end_episode(at(1, 5), "x")
        return first

    asked = client.begin(play)
    assert ev.sample().count >= 4
    assert outcome(asked) == (answer(1, 0), answer(1, 1))
