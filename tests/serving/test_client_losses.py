"""Random episodes over a network that loses requests and answers: the server has what the player lived through."""

import numpy as np
import pytest

from rlsample.errors import ServingError
from rlsample.serving.exchange import NoAnswer, RefusedCall, Unanswered
from tests.env.serving.conftest import answer, at, rows_of
from tests.serving.client_rig import LIMIT_S, Rig, client_of

OK, LOST, DROPPED = "ok", "lost", "dropped"  # nothing happens, the answer goes astray, the request does


class Network:
    """Stands between a client and its connections; each request meets a fate."""

    def __init__(self, client, rng):
        self._send, self._rng = client._connections.send, rng
        self.safe = False
        self.fates = []
        client._connections.send = self.send

    def send(self, request):
        fate = OK if self.safe else str(self._rng.choice([OK, OK, LOST, DROPPED]))
        self.fates.append(fate)
        if fate == DROPPED:
            raise NoAnswer("the request went astray")
        reply = self._send(request._replace(timeout_s=LIMIT_S))
        if fate == LOST:
            raise NoAnswer("the answer went astray")
        return reply


class Life:
    """An episode as its player sees it: rows of (observation, action, reward)."""

    def __init__(self, client, rng, number):
        self.client, self.rng, self.number = client, rng, number
        self.network = Network(client, rng)
        self.rows, self.end = [], None
        self.step = 0

    def until_answered(self, call):
        """Makes the same call until there is an answer."""
        while True:
            try:
                return call()
            except Unanswered:
                continue

    def chance(self, p):
        return self.rng.random() < p

    def now(self):
        return at(self.number, self.step)

    def play(self):
        self.network.safe = True
        self.id = self.client.start_episode()
        self.network.safe = False
        for _ in range(int(self.rng.integers(2, 14))):
            if self.end is None:
                getattr(self, str(self.rng.choice(["ask", "ask", "log", "pay", "pay_with_info"])))()
        if self.end is None:
            self.end = bool(self.chance(0.5))
            self.until_answered(lambda: self.client.end_episode(self.now(), truncated=self.end))
        return self.expected()

    def ask(self):
        alone, obs = self.chance(0.6), self.now()
        while True:
            try:
                if alone:
                    action = self.client.get_action(obs, self.id)
                else:
                    (action,) = self.client.get_actions(obs[None], [self.id])
                break
            except Unanswered:
                if self.chance(0.2):
                    self.refused_meanwhile()
                if self.chance(0.2):
                    self.end = True  # whatever the player says
                    self.until_answered(lambda: self.client.end_episode(obs, truncated=self.chance(0.5)))
                    return
        assert action == answer(self.number, self.step)
        self.add(action)

    def refused_meanwhile(self):
        with pytest.raises(ServingError, match="its last get_action went without an answer"):
            self.client.log_returns(100.0)
        with pytest.raises(ServingError, match="its last get_action went without an answer"):
            self.client.log_action(self.now(), 0)

    def log(self):
        action = int(self.rng.integers(3))
        while True:
            try:
                self.client.log_action(self.now(), action)
                break
            except Unanswered:
                if self.chance(0.3):
                    self.another_in_its_place(action)
                    return
        self.add(action)

    def another_in_its_place(self, action):
        """The server knows the logged action or not: the next call finds out, and then the player goes on."""
        logged, asked = self.now(), at(self.number, self.step + 1)
        while True:
            try:
                found = self.client.get_action(asked)
                break
            except Unanswered:
                continue
            except RefusedCall:
                self.add(action, logged)
        self.step += not (self.rows and np.array_equal(self.rows[-1][0], logged))
        self.add(found, asked)

    def add(self, action, obs=None):
        self.rows.append([self.now() if obs is None else obs, action, 0.0])
        self.step += 1

    def pay(self):
        self.client.log_returns(self.reward(), episode_id=self.id)

    def pay_with_info(self):
        reward = self.reward()
        self.until_answered(lambda: self.client.log_returns(reward, {"a": 1}))

    def reward(self):
        reward = float(self.rng.integers(1, 100)) / 4
        if self.rows:
            self.rows[-1][2] += reward
        return reward

    def expected(self):
        seen = [tuple(obs.tolist()) for obs, _, _ in self.rows] + [tuple(self.now().tolist())]
        last = len(self.rows) - 1
        return [
            (seen[t], seen[t + 1], action, reward, t == last and not self.end, t == last and self.end, t)
            for t, (_, action, reward) in enumerate(self.rows)
        ]


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_rows_are_what_the_player_lived_through(form):
    expected, fates = [], []
    with Rig(batch_mode="complete_episodes", rollout_fragment_length=1) as rig:
        for seed in range(150):
            # One try for each call: whoever waits for less than the first pause gives up after it.
            with client_of(rig, timeout_s=0.001, form=form) as client:
                client._exchange._pause_s = lambda *_: 60.0
                life = Life(client, np.random.default_rng(seed), seed + 1)
                rows = life.play()
                assert client.open_episodes == []
                expected += [rows] if rows else []
                fates += life.network.fates
        assert rig.env.open_episodes == []
        count = sum(map(len, expected))
        assert sorted(rows_of(rig.finish(count)).values()) == sorted(expected)
    assert min(fates.count(fate) for fate in (OK, LOST, DROPPED)) > 200
