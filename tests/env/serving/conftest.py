"""Served episodes for tests: a ServingEnv that plays a function, and rows taken apart by episode."""

import contextlib
import threading

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlsample.env import ServingEnv
from rlsample.env.serving.served_episode import ServingEnded
from rlsample.errors import SamplerError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy.policy import ActOutput
from rlsample.testing.scripted_policy import ScriptedPolicy

OBS_SPACE = Box(-1e6, 1e6, (2,), np.float32)
ACTION_SPACE = Discrete(3)
LIMIT_S = 5.0


class Player(ServingEnv):
    """Its run() is ``play(env)``."""

    def __init__(self, play=None, max_concurrent=4, settings=None, spaces=(OBS_SPACE, ACTION_SPACE)):
        super().__init__(*spaces, max_concurrent=max_concurrent, settings=settings)
        self.play = play

    def run(self):
        if self.play is None:
            super().run()
        else:
            self.play(self)


class RuledPolicy(ScriptedPolicy):
    """The action is the rounded sum of the observation modulo 3, whoever asks; the value is its last number."""

    def act(self, obs, explore=True):
        self.seen.append(obs.copy())
        actions = np.round(np.nan_to_num(obs, posinf=0, neginf=0).clip(-1e6, 1e6).sum(1)).astype(np.int64) % 3
        return ActOutput(actions, {"action_logp": -obs[:, 0] / 8, "values": obs[:, -1].copy()})

    def values(self, obs):
        return obs[:, -1].copy()


class Picky(RuledPolicy):
    """Fails on 13."""

    def act(self, obs, explore=True):
        if 13 in obs:
            raise ValueError("cannot bear 13")
        return super().act(obs, explore)


def at(episode, step):
    """The observation of an episode's step."""
    return np.array([episode, step], np.float32)


def answer(episode, step):
    """What RuledPolicy says to it."""
    return (episode + step) % 3


def rows_of(batches, by_agent=False):
    """eps_id -> its rows in order, each (obs, next_obs, action, reward, terminated, truncated, t).

    By agent: (eps_id, agent_id) -> the agent's rows.
    """
    rows = {}
    for batch in batches:
        next_obs, keys = batch["next_obs"], batch["eps_id"].tolist()
        if by_agent:
            keys = zip(keys, batch["agent_id"].tolist(), strict=True)
        for k, key in enumerate(keys):
            rows.setdefault(key, []).append(
                (
                    tuple(batch["obs"][k].tolist()),
                    tuple(next_obs[k].tolist()),
                    batch["actions"][k].item(),
                    batch["rewards"][k].item(),
                    bool(batch["terminated"][k]),
                    bool(batch["truncated"][k]),
                    int(batch["t"][k]),
                )
            )
    return rows


def drained(evaluator):
    """All batches until run() has ended."""
    batches = []
    while True:
        try:
            batches.append(evaluator.sample())
        except (ServingEnded, SamplerError):
            return batches


@pytest.fixture
def serve():
    """``serve(play, **options) -> evaluator``, closed after the test; sampling runs in the caller's thread."""
    with contextlib.ExitStack() as stack:

        def make(play=None, policy=RuledPolicy, max_concurrent=4, settings=None, num_envs=1, **options):
            env = play if isinstance(play, ServingEnv) else Player(play, max_concurrent, settings)
            options = {"rollout_fragment_length": 4, "sample_async": False, **options}
            return stack.enter_context(CommonPolicyEvaluator(env, policy, num_envs=num_envs, **options))

        yield make


class Worker:
    """A thread that runs calls one at a time; ``do`` waits for the result, ``begin`` does not."""

    def __init__(self):
        self._calls = []
        self._change = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self, call):
        done = threading.Event()
        box = {"done": done}
        with self._change:
            self._calls.append((call, box))
            self._change.notify()
        return box

    def do(self, call):
        return outcome(self.begin(call))

    def _run(self):
        while True:
            with self._change:
                self._change.wait_for(lambda: self._calls or not self._open)
                if not self._calls:
                    return
                call, box = self._calls.pop(0)
            try:
                box["result"] = call()
            except Exception as e:
                box["error"] = e
            box["done"].set()

    def close(self):
        with self._change:
            self._open = False
            self._change.notify()
        self._thread.join(LIMIT_S)


def outcome(box):
    """The result of a call that a Worker began, or its error."""
    assert box["done"].wait(LIMIT_S), "no answer in time"
    if "error" in box:
        raise box["error"]
    return box["result"]


@pytest.fixture
def workers():
    """``workers(n) -> list`` of Workers, ended after the test."""
    made = []

    def make(count):
        made.extend(Worker() for _ in range(count))
        return made[-count:]

    yield make
    for worker in made:
        worker.close()
