import subprocess
import sys

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

import rlsample.policy
from rlsample.policy import RandomPolicy

OBS = Box(-1, 1, (2,), np.float32)


def test_it_draws_uniformly_and_repeats_with_its_seed():
    obs = np.zeros((6000, 2), np.float32)
    policy, again, other = (RandomPolicy(OBS, Discrete(3, start=4), seed=s) for s in (1, 1, 2))
    actions, extras = policy.act(obs)
    np.testing.assert_allclose(np.bincount(actions, minlength=7)[4:] / 6000, np.full(3, 1 / 3), atol=0.03)
    np.testing.assert_allclose(extras["action_logp"], np.full(6000, -np.log(3)), rtol=1e-5)
    np.testing.assert_array_equal(extras["values"], np.zeros(6000))
    np.testing.assert_array_equal(again.act(obs).actions, actions)
    assert (other.act(obs).actions != actions).any()
    state = policy.get_state()
    expected = policy.act(obs).actions
    other.set_state(state)
    np.testing.assert_array_equal(other.act(obs).actions, expected)


def test_it_obeys_masks():
    space = Dict({"x": OBS, "action_mask": MultiBinary(3)})
    mask = np.tile(np.array([[0, 1, 1]], np.int8), (50, 1))
    actions = RandomPolicy(space, Discrete(3)).act({"x": np.zeros((50, 2), np.float32), "action_mask": mask}).actions
    assert set(actions) == {1, 2}


def test_it_has_no_weights_and_counts_versions():
    policy = RandomPolicy(OBS, Discrete(2))
    assert policy.get_weights() == {}
    assert policy.compute_gradients(None) == ({}, {})
    policy.apply_gradients({})
    policy.set_weights({})
    assert policy.version == 2


def test_every_public_name_loads_and_a_wrong_one_is_an_error():
    for name in rlsample.policy.__all__:
        assert getattr(rlsample.policy, name).__name__ == name
    assert set(rlsample.policy.__all__) <= set(dir(rlsample.policy))
    with pytest.raises(AttributeError, match="NoSuchPolicy"):
        rlsample.policy.NoSuchPolicy  # noqa: B018


def test_what_needs_no_torch_does_not_load_it():
    names = "Policy, ActOutput, RandomPolicy, compute_gae, make_distribution, ModelSettings, TorchSettings"
    code = f"import sys; from rlsample.policy import {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
