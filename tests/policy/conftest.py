"""Helpers as fixtures: test modules cannot import each other."""

import copy

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlsample.policy import A2CPolicy, A2CSettings, ModelSettings, PPOPolicy, PPOSettings
from rlsample.sample_batch import SampleBatch

OBS = Box(-5, 5, (4,), np.float32)
TWO = Discrete(2)
SMALL = ModelSettings(hidden=(8, 8))


def _make(kind=PPOPolicy, obs_space=OBS, action_space=TWO, seed=0, **options):
    settings = {PPOPolicy: PPOSettings, A2CPolicy: A2CSettings}[kind](**{"model": SMALL, **options})
    return kind(obs_space, action_space, settings, seed)


def _observations(space, rows, seed=0):
    space.seed(seed)
    samples = [space.sample() for _ in range(rows)]

    def stack(items):
        if isinstance(items[0], dict):
            return {k: stack([x[k] for x in items]) for k in items[0]}
        if isinstance(items[0], tuple):
            return tuple(stack([x[i] for x in items]) for i in range(len(items[0])))
        return np.asarray(items)

    return stack(samples)


def _learning_batch(policy, rows=32, seed=0):
    rng = np.random.default_rng(seed)
    obs = _observations(policy.observation_space, rows, seed)
    actions, extras = copy.deepcopy(policy.act(obs))
    return SampleBatch(
        {
            "obs": obs,
            "actions": actions,
            "action_logp": extras["action_logp"] + rng.normal(scale=0.3, size=rows).astype(np.float32),
            "values": extras["values"],
            "advantages": rng.normal(size=rows).astype(np.float32),
            "value_targets": rng.normal(size=rows).astype(np.float32),
        }
    )


def _assert_same(a, b):
    assert set(a) == set(b)
    for name in a:
        if isinstance(a[name], dict):
            _assert_same(a[name], b[name])
        else:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture
def make():
    """A small policy: ``make(kind, obs_space, action_space, seed, **settings)``."""
    return _make


@pytest.fixture
def observations():
    """Samples of a space as columns."""
    return _observations


@pytest.fixture
def learning_batch():
    """Rows with all columns that PPO and A2C learn from."""
    return _learning_batch


@pytest.fixture
def assert_same():
    """Two nested dicts of arrays and numbers are equal."""
    return _assert_same
