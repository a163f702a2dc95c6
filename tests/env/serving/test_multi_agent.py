"""Episodes that several agents play in: who is asked, every agent's rows, ends, joins and wrong calls (case 11)."""

import collections
import contextlib
import threading

import numpy as np
import pytest

from rlsample.env import MultiAgentServingEnv, ServingSettings
from rlsample.env.serving import ServingEnvAdapter
from rlsample.env.serving.inbox import Inbox
from rlsample.env.serving.served_episode import ServingEnded
from rlsample.errors import ConfigError, ServingError, SpaceError
from rlsample.evaluation import Callbacks, MetricsWindow
from rlsample.policy import PPOPolicy, PPOSettings
from tests.env.serving.conftest import (
    ACTION_SPACE,
    LIMIT_S,
    OBS_SPACE,
    Picky,
    RuledPolicy,
    answer,
    at,
    drained,
    outcome,
    rows_of,
)

BOTH_MODES = pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
AGENTS = ("a", "b", "c")
PATIENT = ServingSettings(max_wait_us=LIMIT_S * 1e6)


class Match(MultiAgentServingEnv):
    """Its run() is ``play(env)``."""

    def __init__(self, play=None, agents=AGENTS, max_concurrent=3, settings=None):
        super().__init__(OBS_SPACE, ACTION_SPACE, agents, max_concurrent, settings)
        self.play = play

    def run(self):
        if self.play is None:
            super().run()
        else:
            self.play(self)


def part(number, rewards, end="terminated"):
    """The rows that an agent must leave whose observations are ``at(number, 0), at(number, 1), ...``."""
    last = len(rewards) - 1
    return [
        (
            (number, k),
            (number, k + 1),
            answer(number, k),
            float(reward),
            k == last and end == "terminated",
            k == last and end == "truncated",
            k,
        )
        for k, reward in enumerate(rewards)
    ]


def ask(env, number_and_step, episode=None):
    """get_action for ``agent -> (number, step)``, with the answers checked."""
    got = env.get_action({agent: at(*of) for agent, of in number_and_step.items()}, episode)
    assert got == {agent: answer(*of) for agent, of in number_and_step.items()}


# ---------------------------------------------------------------------- rows


def case_11(env):
    """a leaves after the first step, c comes for the last one."""
    env.start_episode()
    ask(env, {"a": (10, 0), "b": (20, 0)})
    env.log_returns({"a": 1, "b": 1})
    env.end_agents({"a": at(10, 1)})
    assert env.agents() == ["b"]
    ask(env, {"b": (20, 1)})
    env.log_returns({"b": 1})
    ask(env, {"b": (20, 2), "c": (30, 0)})
    env.log_returns({"b": 1, "c": 1})
    env.end_episode({"b": at(20, 3), "c": at(30, 1)})


@BOTH_MODES
@pytest.mark.parametrize("fragment", [1, 50])
def test_case_11_agents_that_leave_early_and_join_late(serve, batch_mode, fragment):
    ev = serve(Match(case_11), rollout_fragment_length=fragment, batch_mode=batch_mode)
    rows = rows_of(drained(ev), by_agent=True)
    assert rows == {(0, 0): part(10, [1]), (0, 1): part(20, [1, 1, 1]), (0, 2): part(30, [1])}
    (episode,) = ev.get_metrics()
    assert (episode.episode_return, episode.length, episode.eps_id) == (5.0, 3, 0)
    assert episode.agent_returns == {"a": 1.0, "b": 3.0, "c": 1.0}
    assert ev.get_metrics() == []


def test_case_11_a_final_observation_that_is_missing_is_an_error_that_names_the_agent(serve):
    def play(env):
        env.start_episode("m")
        ask(env, {"b": (20, 0), "c": (30, 0)})
        with pytest.raises(ServingError, match="no final observation of 'b', still in episode 'm'"):
            env.end_episode({"c": at(30, 1)})
        env.end_episode({"c": at(30, 1), "b": at(20, 1)})  # nothing was sent before

    rows = rows_of(drained(serve(Match(play))), by_agent=True)
    assert rows == {(0, 1): part(20, [0]), (0, 2): part(30, [0])}


@BOTH_MODES
def test_rewards_of_silent_agents_add_up_until_they_act_or_end(serve, batch_mode):
    def play(env):
        env.start_episode()
        env.log_returns({"a": 100, "b": 100})  # before any action: of nothing
        ask(env, {"a": (10, 0)})
        env.log_returns({"a": 1, "b": 50})
        ask(env, {"b": (20, 0)})
        env.log_returns({"a": 2, "b": 4})
        ask(env, {"b": (20, 1)})
        env.log_returns({"a": 8})
        ask(env, {"a": (10, 1)})
        env.log_returns({"b": 16})
        env.log_returns({"b": 32})
        env.end_episode({"a": at(10, 2), "b": at(20, 2), "c": at(30, 0)}, truncated={"a": True})

    ev = serve(Match(play), batch_mode=batch_mode)
    rows = rows_of(drained(ev), by_agent=True)
    assert rows == {(0, 0): part(10, [11, 0], "truncated"), (0, 1): part(20, [4, 48])}
    (episode,) = ev.get_metrics()
    assert (episode.episode_return, episode.length) == (63.0, 4)
    assert episode.agent_returns == {"a": 11.0, "b": 52.0}


def test_logged_actions_beside_asked_ones(serve):
    """A person plays b: its actions are logged, while a's are asked for."""

    def play(env):
        env.start_episode()
        for k in range(2):
            env.log_action({"b": at(20, k)}, {"b": k}, action_logp={"b": -0.25 - k})
            ask(env, {"a": (10, k)})
            env.log_returns({"a": 1, "b": 3})
        env.log_action({"b": at(20, 2), "c": at(30, 0)}, {"c": 2, "b": 1}, action_logp={"c": -7.0})
        env.end_episode({"a": at(10, 2), "b": at(20, 3), "c": at(30, 1)}, truncated=True)

    batches = drained(serve(Match(play), rollout_fragment_length=50))
    (batch,) = batches
    logp = {
        (agent, t): p
        for agent, t, p in zip(*(batch[c].tolist() for c in ("agent_id", "t", "action_logp")), strict=True)
    }
    assert np.isnan(logp.pop((1, 2)))
    assert logp == {(0, 0): -1.25, (0, 1): -1.25, (1, 0): -0.25, (1, 1): -1.25, (2, 0): -7.0}
    rows = rows_of(batches, by_agent=True)
    assert rows[0, 0] == part(10, [1, 1], "truncated")
    assert [row[2:4] for row in rows[0, 1]] == [(0, 3.0), (1, 3.0), (1, 0.0)]
    assert [row[2:] for row in rows[0, 2]] == [(2, 0.0, False, True, 0)]


def test_only_those_given_are_asked_and_together(serve):
    def play(env):
        one, two = env.start_episode(), env.start_episode()
        ask(env, {"c": (3, 0), "a": (1, 0), "b": (2, 0)}, one)
        ask(env, {"b": (5, 0)}, two)
        assert env.get_action({}, two) == {}
        for episode, final in ((one, {"a": at(1, 1), "b": at(2, 1), "c": at(3, 1)}), (two, {"b": at(5, 1)})):
            env.end_episode(final, episode)

    ev = serve(Match(play))
    drained(ev)
    asked = [seen.tolist() for seen in ev.policy.seen if len(seen)]
    assert asked == [[[3, 0], [1, 0], [2, 0]], [[5, 0]]]


@BOTH_MODES
@pytest.mark.parametrize("ahead", [False, True])
def test_every_row_of_many_matches_at_once(serve, batch_mode, ahead):
    """Threads play matches whose agents come, skip turns and go; a quiet one leaves no rows."""

    def play(env):
        def some(first):
            for match in range(first, 12, 3):
                play_match(env, match)

        threads = [threading.Thread(target=some, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    options = {"sample_async": ahead, "sample_queue_full": "wait"}
    ev = serve(Match(play), rollout_fragment_length=7, num_envs=2, batch_mode=batch_mode, **options)
    batches = drained(ev)
    rows = rows_of(batches, by_agent=True)
    got = {}
    for (eps_id, agent), found in rows.items():
        got.setdefault(eps_id, {})[agent] = found
    want = [expected_match(match) for match in range(12) if match % 4 != 3]
    assert sorted(map(sorted_items, got.values())) == sorted(map(sorted_items, want))
    metrics = {m.eps_id: m for m in ev.get_metrics()}
    assert len(metrics) == 12
    for eps_id, by_agent in got.items():
        episode = metrics[eps_id]
        returns = {AGENTS[agent]: sum(row[3] for row in found) for agent, found in by_agent.items()}
        assert episode.agent_returns == returns
        assert episode.episode_return == sum(returns.values())
        assert episode.length == 5
    assert all((batch["env_id"] < 3).all() for batch in batches)
    assert ev.env.num_unrecorded == 0
    assert ev.env.env.desk.by_lane == [None] * 9
    assert not ev.env.env.open_episodes


def play_match(env, match):
    """Five steps: a always acts, b in even ones, c only in the first two, and then it leaves."""
    episode = env.start_episode(training_enabled=match % 4 != 3)
    steps = {"a": 0, "b": 0, "c": 0}
    for k in range(5):
        acting = ["a", *(["b"] if k % 2 == 0 else []), *(["c"] if k < 2 else [])]
        ask(env, {agent: (100 * match + AGENTS.index(agent), steps[agent]) for agent in acting}, episode)
        for agent in acting:
            steps[agent] += 1
        env.log_returns({agent: k + 1 for agent in steps if agent != "c" or k < 2}, episode_id=episode)
        if k == 1:
            env.end_agents({"c": at(100 * match + 2, 2)}, episode, truncated=True)
    env.end_episode({agent: at(100 * match + AGENTS.index(agent), steps[agent]) for agent in "ab"}, episode)


def expected_match(match):
    return {
        0: part(100 * match, [1, 2, 3, 4, 5]),
        1: part(100 * match + 1, [1 + 2, 3 + 4, 5]),
        2: part(100 * match + 2, [1, 2], "truncated"),
    }


def sorted_items(by_agent):
    return sorted(by_agent.items())


def test_advantages_stay_within_an_agents_part(serve):
    """Two agents of one episode, in rows one after the other: no value of one is used for the other."""
    obs, gamma, lam = 20, 0.5, 0.5

    class Valued(RuledPolicy):
        def postprocess(self, batch):
            from rlsample.policy.advantages import add_advantages

            return add_advantages(batch, self, gamma, lam)

    def play(env):
        env.start_episode()
        for k in range(3):
            env.get_action({"a": at(obs, k), "b": at(obs, 10 + k)})
            env.log_returns({"a": 1, "b": 2})
        env.end_agents({"a": at(obs, 3)})
        env.end_episode({"b": at(obs, 13)}, truncated=True)

    (batch,) = drained(serve(Match(play), Valued, rollout_fragment_length=50))
    got = {agent: batch["advantages"][batch["agent_id"] == agent].tolist() for agent in (0, 1)}
    assert got == {
        0: pytest.approx(advantages([1, 1, 1], [0, 1, 2], [1, 2, 0], gamma, lam)),
        1: pytest.approx(advantages([2, 2, 2], [10, 11, 12], [11, 12, 13], gamma, lam)),
    }
    pieces = batch.split_by_episode()
    assert [(p.count, p["agent_id"].tolist()) for p in pieces] == [(3, [0] * 3), (3, [1] * 3)]
    assert batch.sequences(2).lengths.tolist() == [2, 1, 2, 1]


def advantages(rewards, values, next_values, gamma, lam):
    out, ahead = [], 0.0
    for reward, value, after in zip(rewards[::-1], values[::-1], next_values[::-1], strict=True):
        ahead = reward + gamma * after - value + gamma * lam * ahead
        out.append(ahead)
    return out[::-1]


def test_callbacks_hear_of_each_agents_part(serve):
    heard = []

    class Hears(Callbacks):
        def on_episode_step(self, episode):
            heard.append((episode.agent, episode.last_reward, episode.last_info, episode.eps_id))

        def on_episode_end(self, episode):
            heard.append((episode.agent, episode.length, episode.episode_return))
            episode.custom_metrics["length"] = episode.length

    def play(env):
        env.start_episode()
        env.end_episode({})
        env.start_episode()
        ask(env, {"a": (1, 0), "b": (2, 0)})
        env.log_returns({"a": 5, "b": 6}, {"b": {"n": 2}, "c": {"n": 3}})
        ask(env, {"a": (1, 1)})
        env.end_episode({"a": at(1, 2), "b": at(2, 1)})

    ev = serve(Match(play), callbacks=Hears())
    drained(ev)
    assert sorted(heard, key=str) == sorted(
        [("a", 5.0, {}, 0), ("a", 0.0, {}, 0), ("b", 6.0, {"n": 2}, 0), ("a", 2, 5.0), ("b", 1, 6.0)], key=str
    )
    window = MetricsWindow()
    window.add(ev.get_metrics())
    restored = MetricsWindow()
    restored.set_state(window.get_state())
    for summary in (window.summary(), restored.summary()):
        assert summary["rollout/custom/length_mean"] == 1.5
        assert summary["rollout/agent/b_rew_mean"] == 6.0
        assert (summary["rollout/ep_rew_mean"], summary["rollout/ep_len_mean"]) == (11.0, 2)


# ---------------------------------------------------------------------- ends that were not planned


@BOTH_MODES
def test_a_policy_that_fails_closes_the_episode_for_all_its_agents(serve, batch_mode):
    errors = []

    def play(env):
        env.start_episode("bad")
        ask(env, {"a": (1, 0), "b": (2, 0), "c": (3, 0)})
        env.log_returns({"a": 4, "b": 5, "c": 6})
        env.end_agents({"c": at(3, 1)})
        ask(env, {"b": (2, 1)})
        for call in (
            lambda: env.get_action({"a": at(1, 13)}),
            lambda: env.get_action({"b": at(2, 2)}, "bad"),
            lambda: env.end_episode({"a": at(1, 2), "b": at(2, 2)}, "bad"),
        ):
            with pytest.raises(ServingError) as e:
                call()
            errors.append(str(e.value))
        env.start_episode("good")
        ask(env, {"a": (7, 0)})
        env.end_episode({"a": at(7, 1)})

    ev = serve(Match(play, max_concurrent=1), Picky, batch_mode=batch_mode)
    with pytest.raises(ValueError, match="cannot bear 13"):
        drained(ev)
    rows = rows_of(drained(ev), by_agent=True)
    cut = [((1, 0), (1, 13), answer(1, 0), 4.0, False, True, 0)]
    of_b = [((2, 0), (2, 1), answer(2, 0), 5.0, False, True, 0)]
    assert rows == {(0, 0): cut, (0, 1): of_b, (0, 2): part(3, [6]), (1, 0): part(7, [0])}
    assert "'bad/a': cannot bear 13" in errors[0]
    assert all("'bad' was closed, as no action could be had: cannot bear 13" in text for text in errors[1:])
    assert [m.agent_returns for m in ev.get_metrics()] == [{"a": 4.0, "b": 5.0, "c": 6.0}, {"a": 0.0}]


def test_agents_ended_while_their_question_stands(workers):
    """It ends truncated at the observation it asked about; the others go on."""
    env = Match(settings=PATIENT)
    adapter = ServingEnvAdapter(env)
    with adapter:
        (client,) = workers(1)
        client.do(lambda: env.start_episode("m"))
        first = client.begin(lambda: env.get_action({"a": at(1, 0), "b": at(2, 0)}))
        batch = adapter.poll()
        assert batch.agent_ids.tolist() == [0, 1]
        adapter.send_actions(batch.env_ids, np.array([0, 1]))
        assert outcome(first) == {"a": 0, "b": 1}
        client.do(lambda: env.log_returns({"a": 3, "b": 4}))
        with pytest.raises(ServingError, match="no answer for episode 'm/a'"):
            client.do(lambda: env.get_action({"a": at(1, 1), "b": at(2, 1)}, timeout_s=0.01))
        with pytest.raises(ServingError, match="ask again with the same observation"):
            client.do(lambda: env.get_action({"a": at(1, 9)}))
        client.do(lambda: env.end_agents({"a": at(1, 2)}))
        batch = adapter.poll()
        assert (batch.agent_ids.tolist(), batch.rewards.tolist()) == ([0, 1], [3, 4])
        adapter.send_actions(batch.env_ids, np.array([1, 2]))
        batch = adapter.poll()
        assert list(batch.failures) == [0]
        assert "'m/a' was ended while an answer was outstanding" in str(batch.failures[0])
        adapter.try_restart(np.array([0]))
        assert client.do(lambda: env.get_action({"b": at(2, 1)})) == {"b": 2}, "its question stood"
        assert env.agents("m") == ["b"]
        client.do(lambda: env.end_episode({"b": at(2, 2)}))
        batch = adapter.poll()
        assert (batch.env_ids.tolist(), batch.terminated.tolist()) == ([1], [True])
        assert env.desk.by_lane[:3] == [None, env.desk.by_lane[1], None]
        adapter.try_reset(batch.env_ids)
        assert env.desk.by_lane[:3] == [None] * 3


def test_a_refused_row_of_an_agent_that_has_left_closes_the_episode_too():
    env = Match()
    with ServingEnvAdapter(env) as adapter:
        env.start_episode("m")
        env.log_action({"a": at(1, 0), "b": at(2, 0)}, {"a": 1, "b": 2})
        env.end_agents({"a": at(1, 1)})
        batch = adapter.poll()
        assert batch.agent_ids.tolist() == [0, 1]
        adapter.refuse(batch.env_ids[:1], ValueError("no"))
        with pytest.raises(ServingError, match="'m' was closed, as no action could be had: no"):
            env.log_action({"b": at(2, 1)}, {"b": 0}, "m")
        failed = adapter.poll().failures
        assert sorted(failed) == [0, 1]
        adapter.try_restart(np.array([0, 1]))
        assert env.desk.by_lane == [None] * 9
        assert len({env.start_episode() for _ in range(3)}) == 3, "every place is free"


def test_questions_answered_in_parts_wait_for_all_of_them(workers):
    env = Match(settings=ServingSettings(max_batch=2))
    adapter = ServingEnvAdapter(env)
    with adapter:
        (client,) = workers(1)
        client.do(env.start_episode)
        asking = client.begin(lambda: env.get_action({agent: at(k, 0) for k, agent in enumerate(AGENTS)}))
        batch = adapter.poll()
        assert batch.agent_ids.tolist() == [0, 1]
        adapter.send_actions(batch.env_ids, np.array([2, 1]))
        assert not asking["done"].wait(0.05)
        batch = adapter.poll()
        assert batch.agent_ids.tolist() == [2]
        adapter.send_actions(batch.env_ids, np.array([0]))
        assert outcome(asking) == {"a": 2, "b": 1, "c": 0}


def test_answers_that_came_after_the_time_was_up_are_there_for_the_next_call(workers):
    env = Match(settings=ServingSettings(max_batch=1))
    adapter = ServingEnvAdapter(env)
    with adapter:
        (client,) = workers(1)
        client.do(lambda: env.start_episode("m"))
        question = {"a": at(1, 0), "b": at(2, 0), "c": at(3, 0)}
        with pytest.raises(ServingError, match="m/a' in"):
            client.do(lambda: env.get_action(question, timeout_s=0.01))
        for action in (2, 1):
            batch = adapter.poll()
            adapter.send_actions(batch.env_ids, np.array([action]))
        for _ in range(2):
            with pytest.raises(ServingError, match="m/c' in"):
                client.do(lambda: env.get_action(question, timeout_s=0.01))
        again = client.begin(lambda: env.get_action(question))
        batch = adapter.poll()
        assert batch.agent_ids.tolist() == [2], "nobody was asked twice"
        adapter.send_actions(batch.env_ids, np.array([0]))
        assert outcome(again) == {"a": 2, "b": 1, "c": 0}


def test_a_client_that_is_woken_for_one_agent_wakes_itself_for_the_others(workers):
    """As only a few are woken at a time, each goes on where the one before stopped."""
    env = Match()
    with ServingEnvAdapter(env) as adapter:
        (client,) = workers(1)
        client.do(env.start_episode)
        asking = client.begin(lambda: env.get_action({"a": at(1, 0), "b": at(2, 0)}))
        adapter.poll()
        while not adapter.episode_in(0).waiting:
            pass
        for lane in (0, 1):
            part = env.desk.asking.pop(lane)
            part.answer = lane
            env.desk.answered.append(part)
        env.desk.pass_on()
        assert outcome(asking) == {"a": 0, "b": 1}


def test_agents_of_one_episode_may_be_asked_for_by_different_threads(workers):
    env = Match()
    with ServingEnvAdapter(env) as adapter:
        one, two = workers(2)
        one.do(lambda: env.start_episode("m"))
        asking = [
            one.begin(lambda: env.get_action({"a": at(1, 0)}, "m")),
            two.begin(lambda: env.get_action({"b": at(2, 0)}, "m")),
        ]
        seen = 0
        while seen < 2:
            batch = adapter.poll()
            adapter.send_actions(batch.env_ids, batch.agent_ids + 1)
            seen += len(batch.env_ids)
        assert [outcome(box) for box in asking] == [{"a": 1}, {"b": 2}]
        again = one.begin(lambda: env.get_action({"a": at(1, 1)}, "m"))
        while not env.desk.asking:
            pass
        for call in (
            lambda: env.get_action({"b": at(2, 1), "a": at(1, 1)}, "m"),
            lambda: env.end_agents({"a": at(1, 1)}, "m"),
            lambda: env.log_returns({"a": 1}, episode_id="m"),
            lambda: env.end_episode({"a": at(1, 1), "b": at(2, 1)}, "m"),
        ):
            with pytest.raises(ServingError, match="'m/a' is in use by another thread"):
                two.do(call)
        two.do(lambda: env.log_returns({"b": 1}, episode_id="m"))
        batch = adapter.poll()
        assert batch.agent_ids.tolist() == [0], "the refused call has sent nothing for b"
        adapter.send_actions(batch.env_ids, np.array([2]))
        assert outcome(again) == {"a": 2}


def test_close_ends_a_call_that_waits_for_several_answers(workers):
    env = Match()
    adapter = ServingEnvAdapter(env)
    (client,) = workers(1)
    client.do(env.start_episode)
    assert len(adapter.poll(timeout_s=0.0).env_ids) == 0
    asking = client.begin(lambda: env.get_action({"a": at(1, 0), "b": at(2, 0)}))
    while len(env.desk.asking) < 2:
        pass
    adapter.close()
    for call in (lambda: outcome(asking), lambda: env.get_action({"a": at(1, 0)}, "m"), env.start_episode):
        with pytest.raises(ServingError, match="was closed"):
            call()


def test_a_question_that_comes_in_just_as_serving_ends_is_told_so(monkeypatch):
    env = Match()
    desk, send_all = env.desk, env.desk._send_all

    def too_late(rows):
        desk.stop("serving is over")
        send_all(rows)

    monkeypatch.setattr(desk, "_send_all", too_late)
    env.start_episode("m")
    with pytest.raises(ServingError, match="'m/a': serving is over"):
        env.get_action({"a": at(1, 0), "b": at(2, 0)}, timeout_s=0.01)
    assert not desk.asking


def test_an_episode_expires_when_all_its_agents_are_idle(serve):
    """One that is silent while another plays does not."""
    settings = ServingSettings(idle_timeout_s=0.2)

    def play(env):
        env.start_episode("lively")
        env.start_episode("left")
        ask(env, {"a": (5, 0)}, "left")
        env.log_returns({"a": 2}, episode_id="left")
        ask(env, {"a": (5, 1)}, "left")
        ask(env, {"a": (1, 0), "b": (2, 0)}, "lively")
        step = 1
        while "left" in env.open_episodes:
            ask(env, {"a": (1, step)}, "lively")
            step += 1
        assert env.agents("lively") == ["a", "b"]
        with pytest.raises(ServingError, match="'left' expired: it had no call for"):
            env.get_action({"a": at(5, 2)}, "left")
        env.end_episode({"a": at(1, step), "b": at(2, 1)}, "lively")

    ev = serve(Match(play, settings=settings), rollout_fragment_length=100, batch_mode="complete_episodes")
    rows = rows_of(drained(ev), by_agent=True)
    assert rows[0, 0] == [((5, 0), (5, 1), answer(5, 0), 2.0, False, True, 0)]
    assert rows[1, 1] == part(2, [0])
    assert [m.agent_returns for m in ev.get_metrics()] == [{"a": 2.0}, {"a": 0.0, "b": 0.0}]
    assert ev.env.stats["expired"] == 1


def test_an_episode_with_a_question_that_stands_does_not_expire(workers):
    env = Match(settings=ServingSettings(idle_timeout_s=0.02))
    with ServingEnvAdapter(env) as adapter:
        (client,) = workers(1)
        client.do(lambda: env.start_episode("m"))
        with pytest.raises(ServingError, match="no answer"):
            client.do(lambda: env.get_action({"a": at(1, 0)}, timeout_s=0.01))
        waiting = adapter.poll()
        for _ in range(5):
            assert not adapter.poll(timeout_s=0.02).failures
        assert env.open_episodes == ["m"]
        adapter.send_actions(waiting.env_ids, np.array([1]))
        assert client.do(lambda: env.get_action({"a": at(1, 0)})) == {"a": 1}


def test_entries_put_together_are_never_seen_apart(workers):
    class Together(collections.deque):
        def append(self, entry):
            raise AssertionError(f"{entry} came alone")

    inbox = Inbox()
    inbox.ready = Together()
    waiting = workers(1)[0].begin(lambda: inbox.wait(2, 60.0))
    inbox.put_all([1, 2, 3])
    outcome(waiting)
    assert list(inbox.ready) == [1, 2, 3]


def test_an_episode_nobody_ever_acted_in_expires_too(serve):
    def play(env):
        env.start_episode("empty")
        while env.open_episodes:
            pass

    ev = serve(Match(play, settings=ServingSettings(idle_timeout_s=0.01), max_concurrent=1))
    assert drained(ev) == []
    assert ev.get_metrics() == []


# ---------------------------------------------------------------------- wrong calls


def test_wrong_calls_raise_in_the_caller_and_send_nothing(workers):
    env = Match()
    adapter = ServingEnvAdapter(env)
    with adapter:
        (client,) = workers(1)
        client.do(lambda: env.start_episode("m"))
        bad = np.zeros(3, np.float32)
        calls = [
            (ServingError, "must be a dict by agent, got ndarray", lambda: env.get_action(at(1, 0))),
            (ServingError, "the episode_id comes last", lambda: env.get_action("m", {"a": at(1, 0)})),
            (ServingError, "did you mean 'b'", lambda: env.get_action({"a": at(1, 0), "bb": at(2, 0)})),
            (SpaceError, "agent 'b'.*shape", lambda: env.get_action({"a": at(1, 0), "b": bad})),
            (SpaceError, "agent 'b'", lambda: env.log_action({"a": at(1, 0), "b": bad}, {"a": 0, "b": 0})),
            (SpaceError, "agent 'b'.*outside", lambda: env.log_action({"b": at(1, 0)}, {"b": 7})),
            (SpaceError, "nan", lambda: env.log_action({"b": at(1, 0)}, {"b": 1}, None, {"b": float("nan")})),
            (ServingError, "observations of 'a', actions of 'b'", lambda: env.log_action({"a": at(1, 0)}, {"b": 1})),
            (ServingError, "action_logp of 'c'", lambda: env.log_action({"a": at(1, 0)}, {"a": 1}, None, {"c": -1})),
            (ServingError, "actions must be a dict", lambda: env.log_action({"a": at(1, 0)}, 1)),
            (ServingError, "must be a dict by agent, got float", lambda: env.log_returns(1.0)),
            (ServingError, "inf", lambda: env.log_returns({"a": 1, "b": np.inf})),
            (ServingError, "info of agent 'a' must be a dict", lambda: env.log_returns({"a": 1}, {"a": 3})),
            (ServingError, "unknown agent 'x'", lambda: env.log_returns({"x": 1})),
            (ServingError, "truncated of agent 'a' must be a bool", lambda: env.end_agents({"a": at(1, 0)}, "m", 1)),
            (ServingError, "unknown agent 'x'", lambda: env.end_agents({"a": at(1, 0)}, "m", {"x": True})),
            (SpaceError, "agent 'a'", lambda: env.end_episode({"a": bad})),
            (ServingError, "no episode 'n'", lambda: env.get_action({"a": at(1, 0)}, "n")),
            (ServingError, "already", lambda: env.start_episode("m")),
            (ServingError, "one agent", lambda: env.request_action({"a": at(1, 0)}, "m", print)),
        ]
        for kind, message, call in calls:
            with pytest.raises(kind, match=message):
                client.do(call)
        assert env.agents("m") == []
        assert not env.desk.inbox.ready
        assert not env.desk.asking
        client.do(lambda: env.log_action({"a": at(1, 0)}, {"a": 1}))
        client.do(lambda: env.end_agents({"a": at(1, 1)}))
        for call in (
            lambda: env.get_action({"a": at(1, 1)}),
            lambda: env.log_returns({"a": 1}),
            lambda: env.end_episode({"a": at(1, 1)}),
        ):
            with pytest.raises(ServingError, match="'m/a' has ended for this agent"):
                client.do(call)
        client.do(lambda: env.end_episode({}))
        with pytest.raises(ServingError, match="'m' has ended"):
            client.do(lambda: env.get_action({"b": at(1, 1)}, "m"))
        batch = adapter.poll()
        assert batch.off_policy_actions.actions.tolist() == [1]


def test_what_cannot_work_is_told_at_once(serve):
    for agents in ((), "ab", ("a", "a"), (1, "1")):
        with pytest.raises(ConfigError, match="distinct agents"):
            Match(agents=agents)
    with pytest.raises(ConfigError, match="several agents"):
        serve(Match(), horizon=3, soft_horizon=True)


def test_places_are_counted_in_episodes(serve):
    def play(env):
        env.start_episode("x")
        ask(env, {agent: (k, 0) for k, agent in enumerate(AGENTS)})
        with pytest.raises(ServingError, match="1 episodes are open, which is max_concurrent"):
            env.start_episode("y")
        env.end_episode({agent: at(k, 1) for k, agent in enumerate(AGENTS)})
        env.start_episode("y")

    ev = serve(Match(play, max_concurrent=1, settings=ServingSettings(when_full="error")), rollout_fragment_length=9)
    (batch,) = drained(ev)
    assert (batch.count, ev.env.num_envs) == (3, 3)


def test_agents_that_are_numbers(serve):
    def play(env):
        env.start_episode()
        ask(env, {7: (1, 0), 9: (2, 0)})
        env.log_returns({9: 3})
        env.end_episode({7: at(1, 1), 9: at(2, 1)})

    ev = serve(Match(play, agents=(7, 8, 9)))
    assert rows_of(drained(ev), by_agent=True) == {(0, 0): part(1, [0]), (0, 2): part(2, [3])}
    assert [m.agent_returns for m in ev.get_metrics()] == [{"7": 0.0, "9": 3.0}]


def test_sampling_ends_where_run_does(serve):
    ev = serve(Match(case_11))
    drained(ev)
    with pytest.raises(ServingEnded, match="run\\(\\) returned"):
        ev.sample()


# ---------------------------------------------------------------------- learning


def test_one_policy_learns_from_all_agents(serve):
    """Each agent gets 1 for the action that it sees, as one of three: the shared policy finds it for both."""

    def play(env):
        rng = np.random.default_rng(0)
        while not env.over:
            env.start_episode()
            for _ in range(10):
                wanted = {agent: int(rng.integers(3)) for agent in "ab"}
                seen = {agent: np.array([w - 1, w == 1], np.float32) for agent, w in wanted.items()}
                got = env.get_action(seen)
                env.log_returns({agent: float(got[agent] == wanted[agent]) for agent in got})
            env.end_episode(seen)

    def swallow(env):
        with contextlib.suppress(ServingError):  # closed
            play(env)

    settings = PPOSettings(learning_rate=0.03, gamma=0.0)
    ev = serve(
        Match(swallow, agents=("a", "b")),
        lambda *spaces, seed: PPOPolicy(*spaces, seed=seed, settings=settings),
        rollout_fragment_length=400,
    )
    first = None
    for _ in range(8):
        batch = ev.sample()
        reward = batch["rewards"].mean()
        first = reward if first is None else first
        for _ in range(4):
            ev.compute_apply(batch)
    assert first < 0.55
    assert reward > 0.9
    assert set(batch["agent_id"].tolist()) == {0, 1}


@pytest.mark.parametrize("call", ["log_returns", "end_agents", "get_action"])
def test_any_call_keeps_an_episode_from_being_idle(call):
    """Also one that names nobody: its client is alive."""
    env = Match(agents=("red", "blue"))
    episode_id = env.start_episode()
    shared = env.desk.registry.open[episode_id]
    shared.touched = False  # as the sampling thread does when it has looked
    getattr(env, call)({}, episode_id=episode_id)
    assert shared.touched


def test_an_id_used_again_stays_open_when_the_broken_off_first_use_is_closed_once_more():
    env = Match(agents=("red", "blue"), max_concurrent=2)
    registry = env.desk.registry
    env.start_episode("same")
    first = registry.open["same"]
    registry.close(first, "has ended")
    env.start_episode("same")
    registry.close(first, "was closed")
    assert registry.find("same") is not first
