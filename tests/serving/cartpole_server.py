"""A PolicyServer for CartPole with a policy of which tests know every answer, and all rows it recorded."""

import contextlib
import threading

import numpy as np
from gymnasium.spaces import Box, Discrete

from rlsample.env import ServingEnv
from rlsample.env.serving.serving_settings import ServingSettings
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy.policy import ActOutput
from rlsample.serving import HttpSettings, PolicyServer
from rlsample.testing.scripted_policy import ScriptedPolicy

with contextlib.suppress(ImportError):  # where it is there, servers use it
    import uvloop

    uvloop.new_event_loop().close()  # libuv's first loop opens a pipe that the process keeps: no leak of a test

CARTPOLE = Box(-np.inf, np.inf, (4,), np.float32), Discrete(2)


class Balancing(ScriptedPolicy):
    """Balances for ever while ``skilled``; else it always pushes right, and the pole falls within a dozen steps."""

    skilled = False

    def act(self, obs, explore=True):
        if self.skilled:
            actions = (obs @ np.array([0.03, 0.1, 1.0, 0.3], np.float32) > 0).astype(np.int64)
        else:
            actions = np.ones(len(obs), np.int64)
        return ActOutput(actions, {"action_logp": np.zeros(len(obs), np.float32), "values": obs[:, 0].copy()})


class _Waiting(ServingEnv):
    """Its run() returns when told, so that all rows come out."""

    def __init__(self, spaces, max_concurrent):
        super().__init__(*spaces, max_concurrent=max_concurrent, settings=ServingSettings(when_full="error"))
        self.enough = threading.Event()

    def run(self):
        self.enough.wait()

    def interrupt(self):
        self.enough.set()


class CartPoleServer:
    """A context manager; ``policy``, ``server`` and ``url`` are there inside, ``rows()`` ends the sampling."""

    def __init__(self, port=0, token=None, max_concurrent=32, spaces=CARTPOLE):
        self._env = _Waiting(spaces, max_concurrent)
        self.evaluator = CommonPolicyEvaluator(
            self._env, Balancing, num_envs=1, rollout_fragment_length=1, sample_async=False
        )
        self.policy = self.evaluator.policy
        settings = HttpSettings(port=port, token=token, drain_s=0.5)
        self.server = PolicyServer(self.evaluator, settings, sample=False)
        self._batches = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self):
        while True:
            try:
                self._batches.append(self.evaluator.sample())
            except Exception as e:  # run() has returned, or the env is closed
                self.ended_by = e
                return

    def __enter__(self):
        self.server.start()
        self._thread.start()
        self.url = self.server.url
        return self

    def __exit__(self, *exc):
        self.server.close()
        self._env.enough.set()
        self.evaluator.close()
        self._thread.join(10)

    def stats(self):
        """What /v1/stats answers now."""
        return self.server.stats()

    def rows(self):
        """All batches; nobody is served after that."""
        self._env.enough.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "sampling goes on"
        return self._batches
