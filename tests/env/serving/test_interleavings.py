"""The five calls in random order from many threads, against a model that knows every row they must leave."""

import math
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsample.env import ServingSettings
from rlsample.env.serving.served_episode import ServingEnded
from rlsample.errors import SamplerError, ServingError, SpaceError
from rlsample.evaluation import CommonPolicyEvaluator
from tests.env.serving.conftest import LIMIT_S, Player, RuledPolicy, Worker, answer, at, drained, outcome, rows_of

THREADS = 4
PLACES = 5
REWARDS = st.integers(-8, 8)
WHICH = st.integers(0, 10**6)


class Model:
    """One episode: what its rows have to be. ``actions[k]``, ``rewards[k]`` and ``logps[k]`` belong to step k."""

    def __init__(self, number, episode_id, thread, recorded):
        self.number, self.id, self.thread, self.recorded = number, episode_id, thread, recorded
        self.actions, self.rewards, self.logps = [], [], []
        self.end = None

    @property
    def step(self):
        return len(self.actions)

    def acted(self, action, logp):
        self.actions.append(action)
        self.logps.append(logp)
        self.rewards.append(0.0)

    def rows(self, whole_only):
        if not self.recorded or (whole_only and self.end is None):
            return []
        complete = self.step if self.end else max(0, self.step - 1)
        return [
            (
                (self.number, k),
                (self.number, k + 1),
                self.actions[k],
                self.rewards[k],
                self.end == "terminated" and k == self.step - 1,
                self.end == "truncated" and k == self.step - 1,
                k,
            )
            for k in range(complete)
        ]


class Interleavings(RuleBasedStateMachine):
    """Threads take turns, or call at once, for episodes of their own and of each other, rightly and wrongly."""

    @initialize(
        whole=st.booleans(),
        ahead=st.booleans(),
        fragment=st.integers(1, 9),
        lanes=st.integers(1, 3),
        max_batch=st.sampled_from([None, 1, 2]),
        max_wait_us=st.sampled_from([0, 200]),
        max_queued_rows=st.sampled_from([1, 1000]),
    )
    def begin(self, whole, ahead, fragment, lanes, max_batch, max_wait_us, max_queued_rows):
        self.whole = whole
        self.over = threading.Event()
        options = ServingSettings(
            max_batch=max_batch, max_wait_us=max_wait_us, max_queued_rows=max_queued_rows, timeout_s=LIMIT_S
        )
        self.env = Player(lambda env: self.over.wait(), max_concurrent=PLACES, settings=options)
        self.evaluator = CommonPolicyEvaluator(
            self.env,
            RuledPolicy,
            num_envs=lanes,
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
        return [e for e in self.episodes if e.end is None]

    def pick(self, which):
        return self.open[which % len(self.open)]

    def id_for(self, episode, thread):
        """The id, or None where the thread may leave it out."""
        own = [e for e in self.open if e.thread == thread]
        return None if own == [episode] else episode.id

    def has_open(self):
        return bool(self.open)

    def has_place(self):
        return len(self.open) < PLACES

    # ------------------------------------------------------------------ right calls

    @precondition(has_place)
    @rule(thread=st.integers(0, THREADS - 1), named=st.booleans(), recorded=st.booleans())
    def start(self, thread, named, recorded):
        number = len(self.episodes)
        wish = f"episode {number}" if named else None
        got = self.threads[thread].do(lambda: self.env.start_episode(wish, recorded))
        assert got == wish if named else got not in [e.id for e in self.episodes]
        self.episodes.append(Model(number, got, thread, recorded))

    @precondition(has_open)
    @rule(which=WHICH, thread=st.integers(0, THREADS - 1))
    def ask(self, which, thread):
        episode = self.pick(which)
        given = self.id_for(episode, thread)
        action = self.threads[thread].do(lambda: self.env.get_action(at(episode.number, episode.step), given))
        assert action == answer(episode.number, episode.step)
        episode.acted(action, -episode.number / 8)

    @precondition(has_open)
    @rule(steps=st.integers(1, 3))
    def ask_at_once(self, steps):
        """Every thread asks for one open episode, several times, with rewards in between."""

        def calls(episode):
            got = []
            for k in range(steps):
                got.append(self.env.get_action(at(episode.number, episode.step + k), episode.id))
                self.env.log_returns(k, episode_id=episode.id)
            return got

        chosen = self.open[:THREADS]
        asked = [
            (e, worker.begin(lambda e=e: calls(e)))
            for e, worker in zip(chosen, self.threads[: len(chosen)], strict=True)
        ]
        for episode, box in asked:
            for k, action in enumerate(outcome(box)):
                assert action == answer(episode.number, episode.step)
                episode.acted(action, -episode.number / 8)
                episode.rewards[-1] = float(k)

    @precondition(has_open)
    @rule(which=WHICH, thread=st.integers(0, THREADS - 1), action=st.integers(0, 2), known=st.booleans())
    def log(self, which, thread, action, known):
        episode = self.pick(which)
        given = self.id_for(episode, thread)
        logp = -0.125 * episode.step if known else None
        self.threads[thread].do(lambda: self.env.log_action(at(episode.number, episode.step), action, given, logp))
        episode.acted(action, math.nan if logp is None else logp)

    @precondition(has_open)
    @rule(which=WHICH, thread=st.integers(0, THREADS - 1), reward=REWARDS)
    def reward(self, which, thread, reward):
        episode = self.pick(which)
        given = self.id_for(episode, thread)
        self.threads[thread].do(lambda: self.env.log_returns(reward, episode_id=given))
        if episode.step:
            episode.rewards[-1] += reward

    @precondition(has_open)
    @rule(which=WHICH, thread=st.integers(0, THREADS - 1), truncated=st.booleans())
    def end(self, which, thread, truncated):
        episode = self.pick(which)
        given = self.id_for(episode, thread)
        obs = at(episode.number, episode.step)
        self.threads[thread].do(lambda: self.env.end_episode(obs, given, truncated=truncated))
        episode.end = "truncated" if truncated else "terminated"

    # ------------------------------------------------------------------ wrong calls

    @precondition(lambda self: self.episodes)
    @rule(which=WHICH, thread=st.integers(0, THREADS - 1), call=st.integers(0, 4))
    def call_on_one_that_ended(self, which, thread, call):
        ended = [e for e in self.episodes if e.end]
        given = ended[which % len(ended)].id if ended else "nobody"
        calls = [
            lambda: self.env.get_action(at(0, 0), given),
            lambda: self.env.log_action(at(0, 0), 1, given),
            lambda: self.env.log_returns(1, episode_id=given),
            lambda: self.env.end_episode(at(0, 0), given),
            lambda: self.env.request_action(at(0, 0), given, print),
        ]
        with pytest.raises(ServingError, match=r"has ended|never started"):
            self.threads[thread].do(calls[call])

    @precondition(has_open)
    @rule(which=WHICH, thread=st.integers(0, THREADS - 1), call=st.integers(0, 4))
    def call_with_a_wrong_value(self, which, thread, call):
        given = self.pick(which).id
        calls = [
            lambda: self.env.get_action(np.array([0, np.nan], np.float32), given),
            lambda: self.env.log_action(at(0, 0), 3, given),
            lambda: self.env.log_action(np.zeros(3, np.float32), 1, given),
            lambda: self.env.log_returns(np.inf, episode_id=given),
            lambda: self.env.end_episode("x", given),
        ]
        with pytest.raises((ServingError, SpaceError)):
            self.threads[thread].do(calls[call])

    @precondition(has_open)
    @rule(which=WHICH, thread=st.integers(0, THREADS - 1))
    def start_one_that_is_open(self, which, thread):
        given = self.pick(which).id
        with pytest.raises(ServingError, match="is open already"):
            self.threads[thread].do(lambda: self.env.start_episode(given))

    @invariant()
    def open_ones_are_known(self):
        if hasattr(self, "env"):
            assert sorted(self.env.open_episodes) == sorted(e.id for e in self.open)

    # ------------------------------------------------------------------ the result

    def teardown(self):
        if not hasattr(self, "env"):
            return
        try:
            self.over.set()
            self.check(outcome(self.batches))
        finally:
            self.evaluator.close()
            for worker in [*self.threads, self.sampling]:
                worker.close()

    def check(self, batches):
        got = rows_of(batches)
        want = {e.number: rows for e in self.episodes if (rows := e.rows(self.whole))}
        assert {int(rows[0][0][0]): rows for rows in got.values()} == want
        assert len(got) == len(want), "two episodes share an eps_id, or one has two"
        logps = {
            tuple(o): p for b in batches for o, p in zip(b["obs"].tolist(), b["action_logp"].tolist(), strict=True)
        }
        expected = {(n, k): self.episodes[n].logps[k] for n, rows in want.items() for k in range(len(rows))}
        assert logps.keys() == expected.keys()
        assert all(np.isclose(logps[k], expected[k], equal_nan=True) for k in expected)
        finished = [(e.step, sum(e.rewards)) for e in self.episodes if e.end and e.step]
        metrics = self.evaluator.get_metrics()
        assert sorted((m.length, m.episode_return) for m in metrics) == sorted(finished)
        by_eps_id = {m.eps_id: m for m in metrics}
        for eps_id, rows in got.items():
            model = self.episodes[int(rows[0][0][0])]
            assert (eps_id in by_eps_id) == (model.end is not None)
        with pytest.raises((ServingEnded, SamplerError)):
            self.evaluator.sample()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
