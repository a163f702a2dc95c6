"""Importance sampling: against a slow literal version, against exact values, and what it refuses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.offline import estimate_return
from rlsample.offline.estimators import EpisodeRatios, episode_ratios, estimate_from_ratios
from rlsample.policy import DQNPolicy, PPOPolicy, RandomPolicy
from rlsample.sample_batch import SampleBatch
from rlsample.testing.scripted_policy import ScriptedPolicy

OBS = spaces.Box(0, 100, (1,), np.float32)


class TablePolicy(ScriptedPolicy):
    """Chooses by a table: observation's number -> probability of each action."""

    def __init__(self, table):
        super().__init__(OBS, spaces.Discrete(3))
        self.table = table

    def logp(self, obs, actions):
        with np.errstate(divide="ignore"):
            return np.log([self.table[int(o[0])][a] for o, a in zip(obs, actions, strict=True)]).astype(np.float32)


def episode(states, actions, rewards, probabilities, eps_id=1) -> SampleBatch:
    return SampleBatch(
        {
            "obs": np.array(states, np.float32)[:, None],
            "actions": np.array(actions),
            "rewards": np.array(rewards, np.float32),
            "action_logp": np.log(np.array(probabilities)).astype(np.float32),
            "eps_id": np.full(len(states), eps_id),
        }
    )


# ---------------------------------------------------------------------- literally


def literal(episodes, table, gamma, estimator):
    """The formulas of the module's docstring in loops, step by step: (value, standard error, effective size)."""
    ratios = []
    for e in episodes:
        running, row = 1.0, []
        for t in range(e.count):
            new = table[int(e["obs"][t][0])][e["actions"][t]]
            running *= new / math.exp(e["action_logp"][t])
            row.append(running)
        ratios.append(row)
    n, longest = len(episodes), max(e.count for e in episodes)

    def ratio(i, t):
        return ratios[i][min(t, len(ratios[i]) - 1)]

    def reward(i, t):
        return float(episodes[i]["rewards"][t]) if t < episodes[i].count else 0.0

    if estimator == "is":
        each = [sum(gamma**t * ratio(i, t) * reward(i, t) for t in range(longest)) for i in range(n)]
        value = sum(each) / n
        squares = sum((x - value) ** 2 for x in each)
    else:
        value, moved = 0.0, [0.0] * n
        for t in range(longest):
            total = sum(ratio(i, t) for i in range(n))
            if total == 0:
                continue
            mean = sum(ratio(i, t) * reward(i, t) for i in range(n)) / total
            value += gamma**t * mean
            for i in range(n):
                moved[i] += gamma**t * ratio(i, t) * (reward(i, t) - mean) / (total / n)
        squares = sum(x**2 for x in moved)
    last = [row[-1] for row in ratios]
    size = sum(last) ** 2 / sum(x**2 for x in last) if any(last) else 0.0
    return value, math.sqrt(squares / (n * (n - 1))) if n > 1 else math.nan, size


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = rng.dirichlet(np.ones(3), 4)
    if draw(st.booleans()):  # some actions it never takes
        table[rng.random(table.shape) < 0.3] = 0.0
        table /= np.maximum(table.sum(1, keepdims=True), 1e-9)
    episodes = []
    for number in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 6))
        states, actions = rng.integers(0, 4, length), rng.integers(0, 3, length)
        probabilities = rng.uniform(0.05, 1, length)
        episodes.append(episode(states, actions, rng.normal(size=length), probabilities, number))
    return episodes, table


@settings(max_examples=80, deadline=None)
@given(problems(), st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from(["is", "wis"]))
def test_estimates_equal_the_literal_ones(problem, gamma, estimator):
    episodes, table = problem
    got = estimate_return(episodes, TablePolicy(table), gamma, estimator)
    value, error, size = literal(episodes, table, gamma, estimator)
    assert got.value == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert got.standard_error == pytest.approx(error, rel=1e-5, abs=1e-6, nan_ok=True)
    assert got.effective_sample_size == pytest.approx(size, rel=1e-5)
    logged = [sum(gamma**t * float(r) for t, r in enumerate(e["rewards"])) for e in episodes]
    assert got.logged_value == pytest.approx(sum(logged) / len(logged), rel=1e-5, abs=1e-6)
    assert got.num_episodes == len(episodes)


# ---------------------------------------------------------------------- a case with a known value

# State 0: action 0 ends the episode with reward 1; action 1 goes on, reward 0; action 2 goes on, reward 0.5.
# State 1 (after one step): action 0 ends with reward 4; actions 1 and 2 go on to state 2, reward 0.
# State 2: every action ends: reward 2, 0, 10.
NEXT = {0: [None, 1, 1], 1: [None, 2, 2], 2: [None, None, None]}
REWARD = {0: [1.0, 0.0, 0.5], 1: [4.0, 0.0, 0.0], 2: [2.0, 0.0, 10.0]}
LOGGED = {0: [0.5, 0.25, 0.25], 1: [0.25, 0.5, 0.25], 2: [0.5, 0.25, 0.25]}
NEW = {0: [0.1, 0.3, 0.6], 1: [0.2, 0.2, 0.6], 2: [0.1, 0.1, 0.8]}


def exact_value(table, gamma, state=0):
    return sum(
        p * (REWARD[state][a] + (0 if NEXT[state][a] is None else gamma * exact_value(table, gamma, NEXT[state][a])))
        for a, p in enumerate(table[state])
    )


def play(choose) -> SampleBatch:
    state, states, actions = 0, [], []
    while state is not None:
        action = choose(state)
        states.append(state)
        actions.append(action)
        state = NEXT[state][action]
    rewards = [REWARD[s][a] for s, a in zip(states, actions, strict=True)]
    return episode(states, actions, rewards, [LOGGED[s][a] for s, a in zip(states, actions, strict=True)])


def every_episode_in_proportion() -> list[SampleBatch]:
    """64 episodes in which each course occurs exactly as often as the logged policy plays it."""
    found = []
    for course in itertools.product(range(3), repeat=3):
        steps = iter(course)
        one = play(lambda state, steps=steps: next(steps))
        if one["actions"].tolist() + list(course[one.count :]) != list(course) or any(course[one.count :]):
            continue  # the same course again
        found += [one] * round(64 * math.exp(float(one["action_logp"].sum())))
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("estimator", ["is", "wis"])
def test_the_exact_value_comes_out_of_exact_frequencies(estimator, gamma):
    """With every course as often as its probability both estimators are the value itself; episodes of length 1 to 3."""
    episodes = every_episode_in_proportion()
    assert len(episodes) == 64
    assert {e.count for e in episodes} == {1, 2, 3}
    got = estimate_return(episodes, TablePolicy(NEW), gamma, estimator)
    assert got.value == pytest.approx(exact_value(NEW, gamma), rel=1e-5)
    assert got.logged_value == pytest.approx(exact_value(LOGGED, gamma), rel=1e-5)


@pytest.mark.parametrize("estimator", ["is", "wis"])
def test_standard_errors_are_those_of_repeated_experiments(estimator):
    """900 logs of 400 episodes: the spread of the estimates is their mean standard error, and the mean is the value
    (the weighted one may be off by its bias, which falls with the number of episodes)."""
    rng = np.random.default_rng(7)
    ratios = episode_ratios(every_episode_in_proportion(), TablePolicy(NEW))
    estimates = []
    for _ in range(900):
        drawn = rng.integers(0, 64, 400)
        log = EpisodeRatios(ratios.log_ratios[drawn], ratios.rewards[drawn])
        estimates.append(estimate_from_ratios(log, 0.9, estimator))
    values = np.array([e.value for e in estimates])
    slack = 4 * values.std() / 30 + 0.06 * (estimator == "wis")
    assert values.mean() == pytest.approx(exact_value(NEW, 0.9), abs=slack)
    assert np.mean([e.standard_error for e in estimates]) == pytest.approx(values.std(), rel=0.1)


def test_weighting_has_the_smaller_error_and_the_effective_size_says_how_much_there_is():
    rng = np.random.default_rng(1)
    episodes = [play(lambda state: int(rng.choice(3, p=LOGGED[state]))) for _ in range(300)]
    plain, weighted = (estimate_return(episodes, TablePolicy(NEW), 1.0, name) for name in ("is", "wis"))
    assert weighted.standard_error < plain.standard_error
    assert plain.effective_sample_size == weighted.effective_sample_size < 200
    same = estimate_return(episodes, TablePolicy(LOGGED), 1.0, "wis")
    assert same.effective_sample_size == pytest.approx(300)
    assert same.value == pytest.approx(same.logged_value)


def test_ratios_beyond_all_floats_do_not_break_the_weighted_estimate():
    """1,000 steps, each four times as likely: the ratio is 4^1000, but only its share counts."""
    table = {0: [1.0, 0.0, 0.0]}
    long = episode([0] * 1000, [0] * 1000, [1] * 1000, [0.25] * 1000)
    got = estimate_return([long, long], TablePolicy(table), 1.0, "wis")
    assert got.value == pytest.approx(1000)
    assert got.effective_sample_size == pytest.approx(2)


def test_episodes_that_the_new_policy_never_plays_say_nothing():
    never = TablePolicy({0: [0.0, 1.0, 0.0]})
    got = estimate_return([episode([0], [0], [5.0], [0.5])] * 3, never, 1.0, "wis")
    assert (got.value, got.effective_sample_size, got.num_episodes) == (0.0, 0.0, 3)


class CountingTable(TablePolicy):
    """Takes note of how many rows it is asked about at a time."""

    def __init__(self, table):
        super().__init__(table)
        self.asked = []

    def logp(self, obs, actions):
        self.asked.append(len(actions))
        return super().logp(obs, actions)


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_the_policy_looks_at_a_limited_number_of_rows_at_a_time(monkeypatch, chunk):
    """Five episodes of 1, 4, 2, 7 and 3 rows: 17 in all, cut wherever a chunk is full, and nothing else changes."""
    rng = np.random.default_rng(5)
    episodes = [
        episode(rng.integers(0, 3, n), rng.integers(0, 3, n), rng.normal(size=n), rng.uniform(0.1, 1, n))
        for n in (1, 4, 2, 7, 3)
    ]
    whole = episode_ratios(episodes, TablePolicy(NEW))
    monkeypatch.setattr("rlsample.offline.estimators._CHUNK_ROWS", chunk)
    policy = CountingTable(NEW)
    got = episode_ratios(episodes, policy)
    assert policy.asked == [chunk] * (17 // chunk) + [17 % chunk] * (17 % chunk > 0)
    np.testing.assert_array_equal(got.log_ratios, whole.log_ratios)
    np.testing.assert_array_equal(got.rewards, whole.rewards)


def test_many_rows_come_in_chunks_without_being_asked_for():
    policy = CountingTable(NEW)
    episode_ratios([episode([0] * 5000, [0] * 5000, [1.0] * 5000, [0.5] * 5000)] * 2, policy)
    assert policy.asked == [4096, 4096, 1808]


# ---------------------------------------------------------------------- what is refused


def test_unknown_probabilities_are_an_error():
    policy = TablePolicy(NEW)
    good = episode([0], [0], [1.0], [0.5])
    bare = SampleBatch({name: column for name, column in good.items() if name != "action_logp"})
    with pytest.raises(ConfigError, match="needs the column action_logp"):
        estimate_return([good, bare], policy)
    for wrong in (np.nan, -np.inf):
        odd = episode([0, 1], [1, 0], [1.0, 1.0], [0.5, 0.5], eps_id=42)
        odd["action_logp"] = np.array([-0.5, wrong], np.float32)
        with pytest.raises(ConfigError, match=f"action_logp is {wrong} at row 1 of episode 42"):
            estimate_return([good, odd], policy)


def test_other_things_that_cannot_work_are_named():
    good = [episode([0], [0], [1.0], [0.5])]
    with pytest.raises(ConfigError, match="no whole episodes"):
        estimate_return([], TablePolicy(NEW))
    with pytest.raises(ConfigError, match="did you mean 'wis'"):
        estimate_return(good, TablePolicy(NEW), estimator="wiss")
    with pytest.raises(ConfigError, match=r"gamma must be in \[0, 1\], not 1.5"):
        estimate_return(good, TablePolicy(NEW), gamma=1.5)
    with pytest.raises(ConfigError, match="ScriptedPolicy does not tell the probabilities"):
        estimate_return(good, ScriptedPolicy(OBS, spaces.Discrete(3)))


# ---------------------------------------------------------------------- the policies' probabilities


@pytest.mark.parametrize(
    ("make", "action_space"),
    [
        (PPOPolicy, spaces.Discrete(3, start=5)),
        (PPOPolicy, spaces.Box(-1, 1, (2,), np.float32)),
        (PPOPolicy, spaces.Dict({"a": spaces.MultiDiscrete([2, 3]), "b": spaces.Discrete(2)})),
        (RandomPolicy, spaces.Discrete(4)),
        (DQNPolicy, spaces.Discrete(3, start=2)),
    ],
)
def test_logp_is_what_act_says_of_its_own_actions(make, action_space):
    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    policy = make(observation_space, action_space, seed=3)
    if make is DQNPolicy:
        policy.fix_epsilon(0.4)
    obs = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    out = policy.act(obs)
    expected = out.extras["action_logp"].copy()
    got = policy.logp(obs, out.actions)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_probabilities_of_masked_dqn_actions_sum_to_one():
    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32), "action_mask": spaces.MultiBinary(3)})
    policy = DQNPolicy(observation_space, spaces.Discrete(3), seed=1)
    policy.fix_epsilon(0.3)
    obs = {"x": np.ones((1, 2), np.float32), "action_mask": np.array([[1, 0, 1]], np.int8)}
    chances = [float(np.exp(policy.logp(obs, np.array([a]))[0])) for a in range(3)]
    assert chances[1] == 0.0
    assert sum(chances) == pytest.approx(1.0)
