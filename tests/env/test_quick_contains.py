"""The quick check of Discrete actions answers as the slow one does, and nothing else of the space changes."""

from __future__ import annotations

import copy
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from rlsample.env.quick_contains import quicken


class Holder(gymnasium.Env):
    def __init__(self, space):
        self.action_space = space


SPACES = [Discrete(3), Discrete(3, start=-1), Discrete(1, start=7), Discrete(2, dtype=np.uint8)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_answers_are_those_of_the_space(space):
    plain, quick = copy.deepcopy(space), Holder(copy.deepcopy(space))
    quicken(quick)
    values = [*range(-4, 12), True, False, 1.0, 2**80, -(2**80), None, "1", [1], np.int64(1), np.int8(-1), np.uint8(1)]
    values += [np.array(1), np.array([1]), np.float32(1), np.bool_(True), np.int64(8)]
    for x in values:
        assert quick.action_space.contains(x) == plain.contains(x), x
        assert (x in quick.action_space) == (x in plain), x


def test_the_space_is_otherwise_the_same():
    env = Holder(Discrete(4, seed=3))
    quicken(env)
    first = env.action_space.contains
    quicken(env)
    assert env.action_space.contains is first
    assert type(env.action_space) is Discrete
    assert env.action_space == Discrete(4) == env.action_space
    assert repr(env.action_space) == "Discrete(4)"
    for twin in (pickle.loads(pickle.dumps(env.action_space)), copy.deepcopy(env.action_space)):
        assert twin == env.action_space
        assert [twin.contains(x) for x in (-1, 0, 3, 4)] == [False, True, True, False]
        assert twin.contains.space is twin
        assert twin.sample() in range(4)


def test_other_spaces_and_subclasses_are_left_alone():
    class Odd(Discrete):
        def contains(self, x):
            return x == 7

    for space in (Odd(3), Box(0, 1, (2,))):
        env = Holder(space)
        quicken(env)
        assert "contains" not in vars(space)
    quicken(gymnasium.Env())
    wrapped = gymnasium.make("CartPole-v1")
    quicken(wrapped)
    assert "contains" in vars(wrapped.unwrapped.action_space)


BATCHES = [MultiDiscrete([3] * 4), MultiDiscrete([3] * 4, start=[-1] * 4), MultiDiscrete([2] * 4, dtype=np.int8)]


@pytest.mark.parametrize("space", BATCHES, ids=str)
def test_batches_are_judged_as_by_the_space(space):
    plain, quick = copy.deepcopy(space), Holder(copy.deepcopy(space))
    quicken(quick)
    assert "contains" in vars(quick.action_space)
    rows = [[0, 1, 0, 1], [0, 1, 2, 1], [-1, 0, 1, 0], [0, 0, 0, 3], [-2, 0, 0, 0], [0, 1, 0]]
    values = [np.array(row).astype(dtype) for row in rows for dtype in (np.int64, np.int8, np.float32, np.uint64)]
    for x in [*values, *rows, np.zeros((2, 2), np.int64), np.zeros(4, bool), None, 1]:
        assert quick.action_space.contains(x) == plain.contains(x), x
    twin = pickle.loads(pickle.dumps(quick.action_space))
    assert twin.contains.space is twin


def test_uneven_batches_are_left_alone():
    for space in (MultiDiscrete([2, 3]), MultiDiscrete([[2, 2], [2, 2]]), MultiDiscrete([2, 2], start=[0, 1])):
        env = Holder(space)
        quicken(env)
        assert "contains" not in vars(space)
