"""The sum tree against sums written out, and the frequencies of its draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.optimizers.sum_tree import SumTree

PRIORITY = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


@given(
    st.integers(1, 20).flatmap(
        lambda n: st.tuples(
            st.just(n), st.lists(st.lists(st.tuples(st.integers(0, n - 1), PRIORITY), max_size=8), max_size=6)
        )
    )
)
def test_sums_minima_and_leaves_are_those_of_a_list(case):
    capacity, updates = case
    tree, literal = SumTree(capacity), [0.0] * capacity
    for update in updates:
        tree.set(np.array([leaf for leaf, _ in update], np.int64), np.array([p for _, p in update]))
        for leaf, priority in update:
            literal[leaf] = priority
        assert tree.get(np.arange(capacity)).tolist() == literal
        assert tree.total == pytest.approx(sum(literal), rel=1e-12)
        assert tree.smallest == min([p for p in literal if p > 0], default=np.inf)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=33).filter(any))
def test_find_is_the_first_leaf_whose_running_sum_is_larger(priorities):
    tree = SumTree(len(priorities))
    tree.set(np.arange(len(priorities)), np.array(priorities))
    masses = np.arange(0, sum(priorities), 0.5)
    literal = [next(i for i in range(len(priorities)) if sum(priorities[: i + 1]) > mass) for mass in masses]
    assert tree.find(masses).tolist() == literal


def test_a_mass_at_the_total_finds_the_last_leaf_with_a_priority():
    tree = SumTree(5)
    tree.set(np.array([1, 3]), np.array([0.1, 0.2]))
    assert tree.find(np.array([tree.total, 1e9, 0.0])).tolist() == [3, 3, 1]


def test_draws_are_stratified():
    priorities = np.array([5.0, 0.0, 1.0, 2.5, 1.5])
    tree = SumTree(5)
    tree.set(np.arange(5), priorities)
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = np.bincount(tree.draw(40, rng), minlength=5)
        assert (np.abs(counts - 4 * priorities) < 2).all()  # 40 draws of a total of 10
        assert counts[1] == 0


def test_draws_alone_have_the_frequencies_of_the_priorities():
    priorities = np.array([5.0, 0.5, 1.0, 2.5, 1.0])
    tree, rng, number = SumTree(5), np.random.default_rng(1), 20_000
    tree.set(np.arange(5), priorities)
    counts = np.bincount([tree.draw(1, rng)[0] for _ in range(number)], minlength=5)
    expected = number * priorities / priorities.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom: 0.1 % are above


@pytest.mark.parametrize(
    ("leaves", "priorities"), [([0], [-1]), ([0], [np.nan]), ([0], [np.inf]), ([4], [1]), ([-1], [1])]
)
def test_refusals_change_nothing(leaves, priorities):
    tree = SumTree(4)
    tree.set(np.array([2]), np.array([7.0]))
    with pytest.raises(ConfigError):
        tree.set(np.array(leaves), np.array(priorities))
    assert tree.get(np.arange(4)).tolist() == [0, 0, 7, 0]
    assert tree.total == 7


def test_nothing_to_draw():
    with pytest.raises(ConfigError, match="all priorities are 0"):
        SumTree(4).draw(2, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="at least 1"):
        SumTree(0)


def test_many_leaves():
    rng = np.random.default_rng(4)
    number = 5000  # more than 16 ** 3: four levels
    tree, literal = SumTree(number), np.zeros(number)
    for _ in range(20):
        leaves = rng.integers(0, number, 900)
        priorities = np.floor(rng.exponential(3, 900))
        tree.set(leaves, priorities)
        for leaf, priority in zip(leaves.tolist(), priorities.tolist(), strict=True):
            literal[leaf] = priority
        assert tree.total == literal.sum()
        assert tree.smallest == literal[literal > 0].min()
        masses = rng.random(300) * literal.sum()
        assert tree.find(masses).tolist() == np.searchsorted(literal.cumsum(), masses, side="right").tolist()
