"""Calls for several agents in random order and from several threads, against a model that knows every row."""

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsample.env import MultiAgentServingEnv, ServingSettings
from rlsample.errors import ServingError, SpaceError
from rlsample.evaluation import CommonPolicyEvaluator
from tests.env.serving.conftest import (
    ACTION_SPACE,
    LIMIT_S,
    OBS_SPACE,
    RuledPolicy,
    Worker,
    answer,
    at,
    drained,
    outcome,
    rows_of,
)

AGENTS = ("a", "b", "c")
THREADS = 3
PLACES = 3
WHICH = st.integers(0, 10**6)
SOME = st.sets(st.sampled_from(AGENTS), min_size=1).map(sorted)


class Match(MultiAgentServingEnv):
    def __init__(self, over, options):
        super().__init__(OBS_SPACE, ACTION_SPACE, AGENTS, PLACES, options)
        self.until = over

    def run(self):
        self.until.wait()


class Part:
    """One agent in one episode: what its rows have to be."""

    def __init__(self, number):
        self.number, self.actions, self.rewards, self.end = number, [], [], None

    @property
    def step(self):
        return len(self.actions)

    def acted(self, action):
        self.actions.append(action)
        self.rewards.append(0.0)

    def rows(self, whole_only):
        if whole_only and self.end is None:
            return []
        complete = self.step if self.end else max(0, self.step - 1)
        last = self.step - 1
        return [
            (
                (self.number, k),
                (self.number, k + 1),
                self.actions[k],
                self.rewards[k],
                self.end == "terminated" and k == last,
                self.end == "truncated" and k == last,
                k,
            )
            for k in range(complete)
        ]


class Shared:
    """One episode."""

    def __init__(self, number, episode_id, recorded):
        self.id, self.recorded, self.closed, self.steps = episode_id, recorded, False, 0
        self.parts = {agent: Part(10 * number + k) for k, agent in enumerate(AGENTS)}

    def obs(self, agents, ahead=0):
        return {a: at(self.parts[a].number, self.parts[a].step + ahead) for a in agents}

    def able(self, agents):
        return [a for a in agents if self.parts[a].end is None]

    def playing(self):
        return [a for a in AGENTS if self.parts[a].step and self.parts[a].end is None]


class AgentInterleavings(RuleBasedStateMachine):
    @initialize(
        whole=st.booleans(),
        ahead=st.booleans(),
        fragment=st.integers(1, 9),
        max_batch=st.sampled_from([None, 1, 2]),
        max_queued_rows=st.sampled_from([1, 1000]),
    )
    def begin(self, whole, ahead, fragment, max_batch, max_queued_rows):
        self.whole = whole
        self.over = threading.Event()
        options = ServingSettings(
            max_batch=max_batch, max_wait_us=200, max_queued_rows=max_queued_rows, timeout_s=LIMIT_S
        )
        self.env = Match(self.over, options)
        self.evaluator = CommonPolicyEvaluator(
            self.env,
            RuledPolicy,
            rollout_fragment_length=fragment,
            batch_mode="complete_episodes" if whole else "truncate_episodes",
            sample_async=ahead,
            sample_queue_full="wait",
        )
        self.threads = [Worker() for _ in range(THREADS)]
        self.sampling = Worker()
        self.batches = self.sampling.begin(lambda: drained(self.evaluator))
        self.episodes = []

    @property
    def open(self):
        return [e for e in self.episodes if not e.closed]

    def pick(self, which):
        return self.open[which % len(self.open)]

    def has_open(self):
        return bool(self.open)

    def do(self, which, call):
        return self.threads[which % THREADS].do(call)

    def acted(self, episode, answers):
        for agent, action in answers.items():
            assert action == answer(episode.parts[agent].number, episode.parts[agent].step)
            episode.parts[agent].acted(action)
        episode.steps += bool(answers)

    # ------------------------------------------------------------------ right calls

    @precondition(lambda self: len(self.open) < PLACES)
    @rule(which=WHICH, recorded=st.booleans())
    def start(self, which, recorded):
        number = len(self.episodes)
        got = self.do(which, lambda: self.env.start_episode(f"match {number}", recorded))
        self.episodes.append(Shared(number, got, recorded))

    @precondition(has_open)
    @rule(which=WHICH, agents=SOME)
    def ask(self, which, agents):
        episode = self.pick(which)
        obs = episode.obs(episode.able(agents))
        got = self.do(which, lambda: self.env.get_action(obs, episode.id))
        assert list(got) == list(obs)
        self.acted(episode, got)

    @precondition(has_open)
    @rule(which=WHICH, first=SOME)
    def ask_from_two_threads(self, which, first):
        """Of one episode, some agents here and the others there."""
        episode = self.pick(which)
        sides = [episode.able(first), episode.able(set(AGENTS) - set(first))]
        calls = [(side, episode.obs(side)) for side in sides]
        boxes = [
            worker.begin(lambda obs=obs: self.env.get_action(obs, episode.id))
            for worker, (_, obs) in zip(self.threads, calls, strict=False)
        ]
        for box in boxes:
            self.acted(episode, outcome(box))

    @precondition(has_open)
    @rule(which=WHICH, agents=SOME, action=st.integers(0, 2))
    def log(self, which, agents, action):
        episode = self.pick(which)
        able = episode.able(agents)
        obs, actions = episode.obs(able), dict.fromkeys(able, action)
        self.do(which, lambda: self.env.log_action(obs, actions, episode.id))
        for agent in able:
            episode.parts[agent].acted(action)
        episode.steps += bool(able)

    @precondition(has_open)
    @rule(which=WHICH, agents=SOME, reward=st.integers(-8, 8))
    def reward(self, which, agents, reward):
        episode = self.pick(which)
        rewards = {agent: reward + k for k, agent in enumerate(episode.able(agents))}
        self.do(which, lambda: self.env.log_returns(rewards, episode_id=episode.id))
        for agent, value in rewards.items():
            if episode.parts[agent].step:
                episode.parts[agent].rewards[-1] += value

    @precondition(has_open)
    @rule(which=WHICH, agents=SOME, truncated=st.dictionaries(st.sampled_from(AGENTS), st.booleans()))
    def end_some(self, which, agents, truncated):
        episode = self.pick(which)
        able = episode.able(agents)
        self.do(which, lambda: self.env.end_agents(episode.obs(able), episode.id, truncated))
        self.ended(episode, able, truncated)

    @precondition(has_open)
    @rule(which=WHICH, truncated=st.dictionaries(st.sampled_from(AGENTS), st.booleans()))
    def end(self, which, truncated):
        episode = self.pick(which)
        playing = episode.playing()
        self.do(which, lambda: self.env.end_episode(episode.obs(playing), episode.id, truncated))
        self.ended(episode, playing, truncated)
        episode.closed = True

    def ended(self, episode, agents, truncated):
        for agent in agents:
            if episode.parts[agent].step:
                episode.parts[agent].end = "truncated" if truncated.get(agent) else "terminated"

    # ------------------------------------------------------------------ wrong calls

    @precondition(has_open)
    @rule(which=WHICH, call=st.integers(0, 3))
    def one_bad_value_among_good_ones(self, which, call):
        """Nothing is sent for any of them: the model does not move."""
        episode = self.pick(which)
        able = episode.able(AGENTS)
        obs = {**episode.obs(able), "c": np.array([0, np.nan], np.float32)}
        calls = [
            lambda: self.env.get_action(obs, episode.id),
            lambda: self.env.log_action(obs, dict.fromkeys(obs, 1), episode.id),
            lambda: self.env.log_returns({**dict.fromkeys(able, 3), "c": np.inf}, episode_id=episode.id),
            lambda: self.env.end_agents(obs, episode.id),
        ]
        with pytest.raises((ServingError, SpaceError)):
            self.do(which, calls[call])

    @precondition(has_open)
    @rule(which=WHICH)
    def an_end_that_forgets_somebody(self, which):
        episode = self.pick(which)
        if episode.playing():
            with pytest.raises(ServingError, match="no final observation of"):
                self.do(which, lambda: self.env.end_episode({}, episode.id))

    @invariant()
    def who_plays_is_known(self):
        for episode in self.open if hasattr(self, "env") else ():
            assert sorted(self.env.agents(episode.id)) == episode.playing()

    # ------------------------------------------------------------------ the result

    def teardown(self):
        if not hasattr(self, "env"):
            return
        try:
            self.over.set()
            self.check(rows_of(outcome(self.batches), by_agent=True))
        finally:
            self.evaluator.close()
            for worker in [*self.threads, self.sampling]:
                worker.close()

    def check(self, got):
        numbers = {int(rows[0][0][0]): (key, rows) for key, rows in got.items()}
        assert len(numbers) == len(got)
        want = {
            part.number: rows
            for e in self.episodes
            if e.recorded
            for part in e.parts.values()
            if (rows := part.rows(self.whole))
        }
        assert {number: rows for number, (_, rows) in numbers.items()} == want
        assert all(agent_id == number % 10 for number, ((_, agent_id), _) in numbers.items())
        shared_ids = {(number // 10, eps_id) for number, ((eps_id, _), _) in numbers.items()}
        assert len(shared_ids) == len({n for n, _ in shared_ids}) == len({e for _, e in shared_ids})
        metrics = self.evaluator.get_metrics()
        finished = [
            (e.steps, sorted((a, sum(p.rewards)) for a, p in e.parts.items() if p.step))
            for e in self.episodes
            if e.closed and e.steps
        ]
        assert sorted((m.length, sorted(m.agent_returns.items())) for m in metrics) == sorted(finished)
        assert all(m.episode_return == sum(m.agent_returns.values()) for m in metrics)
        of_closed = [e for e in self.episodes if e.closed]
        held = sum(lane is not None for lane in self.env.desk.by_lane)
        assert held <= sum(bool(part.step) for e in self.episodes if e not in of_closed for part in e.parts.values())


TestAgentInterleavings = AgentInterleavings.TestCase
TestAgentInterleavings.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
