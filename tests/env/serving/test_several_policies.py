"""Several policies in a served episode: who acts for whom, whose rows each learns from, and what cannot work."""

import itertools
import time

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlsample.engine import ThreadEngine
from rlsample.env import MultiAgentServingEnv
from rlsample.errors import ConfigError, ServingError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.optimizers import SyncSamplesOptimizer, SyncSamplesSettings
from rlsample.policy import DQNPolicy, PPOPolicy, PPOSettings, RandomPolicy
from rlsample.policy.policy_group import PolicyGroup
from rlsample.sample_batch import SampleBatch
from tests.env.serving.conftest import ACTION_SPACE, OBS_SPACE, Player, RuledPolicy, at, drained, rows_of
from tests.env.serving.test_multi_agent import AGENTS, BOTH_MODES, Match
from tests.env.serving.test_optimizers import OPTIMIZERS, SETS, SPACES

ALL = {"rollout_fragment_length": 50}  # more than there is: one batch
NAMES = {"a": "red", "b": "blue", "c": "red"}


class Other(RuledPolicy):
    """One more than RuledPolicy, and V is ten times as much."""

    def act(self, obs, explore=True):
        out = super().act(obs, explore)
        return out._replace(actions=(out.actions + 1) % 3, extras={**out.extras, "values": 10 * out.extras["values"]})


def play_three(env):
    """Two steps of all, in one call; then a and c leave, and b asks alone."""
    env.start_episode()
    for k in range(2):
        env.get_action({agent: at(number, k) for number, agent in enumerate(AGENTS, 1)})
        env.log_returns({agent: 10 * number + k for number, agent in enumerate(AGENTS, 1)})
    env.end_agents({"a": at(1, 2), "c": at(3, 2)})
    env.get_action({"b": at(2, 2)})
    env.log_returns({"b": 22})
    env.end_episode({"b": at(2, 3)}, truncated=True)


def expected(number, steps, shift, end):
    return [
        (
            (number, k),
            (number, k + 1),
            (number + k + shift) % 3,
            10.0 * number + k,
            k == steps - 1 and end == "term",
            k == steps - 1 and end == "trunc",
            k,
        )
        for k in range(steps)
    ]


@BOTH_MODES
@pytest.mark.parametrize("fragment", [1, 50])
@pytest.mark.parametrize("sample_async", [False, True])
def test_each_agent_is_answered_by_its_policy(serve, batch_mode, fragment, sample_async):
    policies = {"red": RuledPolicy, "blue": Other}
    options = {"policy_mapping_fn": NAMES.get, "batch_mode": batch_mode, "rollout_fragment_length": fragment}
    ev = serve(Match(play_three), policies, sample_async=sample_async, sample_queue_full="wait", **options)
    batches = drained(ev)
    assert rows_of(batches, by_agent=True) == {
        (0, 0): expected(1, 2, 0, "term"),
        (0, 1): expected(2, 3, 1, "trunc"),
        (0, 2): expected(3, 2, 0, "term"),
    }
    for batch in batches:
        factor = np.where(batch["agent_id"] == 1, 10, 1)
        assert np.array_equal(batch["values"], factor * batch["obs"][:, 1])
    red, blue = ev.policy.policies["red"], ev.policy.policies["blue"]
    assert {2.0} == {row[0] for obs in blue.seen for row in obs.tolist()}
    assert {1.0, 3.0} == {row[0] for obs in red.seen for row in obs.tolist()}
    if not sample_async:
        assert [len(obs) for obs in red.seen] == [2, 2]  # one pass for both of its agents
    (episode,) = ev.get_metrics()
    assert episode.agent_returns == {"a": 21.0, "b": 63.0, "c": 61.0}


def test_batches_put_the_rows_of_a_policy_together_and_keep_its_fragments(serve):
    ev = serve(Match(play_three), {"red": RuledPolicy, "blue": Other}, policy_mapping_fn=NAMES.get, **ALL)
    (batch,) = drained(ev)
    assert batch["agent_id"].tolist() == [0, 0, 2, 2, 1, 1, 1]
    assert batch.fragment_lengths.tolist() == [2, 2, 3]
    assert batch["next_obs"][:, 1].tolist() == [1, 2, 1, 2, 1, 2, 3]
    assert batch.next_obs_source.source is None  # so that values of what follows can be had in one pass
    assert batch.bootstrap(np.arange(7), np.array([70, 71, 72])).tolist() == [1, 70, 3, 71, 5, 6, 72]


# ---------------------------------------------------------------------- learning

GREEDY = PPOSettings(gamma=1.0, gae_lambda=1.0)


def ppo(*spaces, seed=0):
    return PPOPolicy(*spaces, GREEDY, seed)


def test_each_policy_learns_from_its_own_rows(serve):
    """As it does alone with these rows, bit for bit; targets are the sums of an agent's own rewards to come."""
    ev = serve(Match(play_three), {"red": ppo, "blue": ppo}, policy_mapping_fn=NAMES.get, **ALL)
    batch = ev.sample()
    for number, agent in enumerate((0, 2), 1):
        targets = batch["value_targets"][batch["agent_id"] == agent]
        reward = [10.0, 30.0][number - 1]
        assert targets.tolist() == [2 * reward + 1, reward + 1]
    alone = {}
    for name, agents in (("red", (0, 2)), ("blue", (1,))):
        policy = ev.policy.policies[name]
        alone[name] = PPOPolicy(OBS_SPACE, ACTION_SPACE, GREEDY, seed=99)
        alone[name].set_weights(policy.get_weights())
        told = alone[name].learn(batch.select(np.isin(batch["agent_id"], agents)))
        alone[name].told = told
    before = ev.policy.version
    stats = ev.compute_apply(batch)
    assert ev.policy.version == before + 1
    assert stats == {f"{name}/{key}": x for name, policy in alone.items() for key, x in policy.told.items()}
    for key, array in ev.get_weights().items():
        name, _, parameter = key.partition("/")
        assert np.array_equal(array, alone[name].get_weights()[parameter]), key
    seeds = [policy.get_weights() for policy in ev.policy.policies.values()]
    assert any(not np.array_equal(seeds[0][key], seeds[1][key]) for key in seeds[0])


def test_a_policy_that_does_not_train_stays_as_it_is(serve):
    options = {"policy_mapping_fn": NAMES.get, "policies_to_train": ["blue"], **ALL}
    ev = serve(Match(play_three), {"red": ppo, "blue": ppo}, **options)
    batch = ev.sample()
    before = ev.get_weights()
    gradients, stats = ev.compute_gradients(batch)
    assert {key.partition("/")[0] for key in (*gradients, *stats)} == {"blue"}
    ev.apply_gradients(gradients)
    changed = {key.partition("/")[0] for key, x in ev.get_weights().items() if not np.array_equal(x, before[key])}
    assert changed == {"blue"}
    assert ev.compute_apply(batch.select(batch["agent_id"] == 0)) == {}
    with pytest.raises(ConfigError, match="gradients of policy 'red', which does not learn here"):
        ev.apply_gradients({key.replace("blue/", "red/"): x for key, x in gradients.items()})


def test_weights_and_state_go_from_one_evaluator_to_another(serve):
    def make(seed):
        policies = {"red": ppo, "blue": ppo, "none": RandomPolicy}
        return serve(Match(play_three), policies, policy_mapping_fn=NAMES.get, seed=seed, **ALL)

    one, two = make(1), make(2)
    one.compute_apply(one.sample())
    two.set_weights(one.get_weights())
    assert all(np.array_equal(x, one.get_weights()[key]) for key, x in two.get_weights().items())
    with pytest.raises(ConfigError, match=r"unknown policy 'rde'.*did you mean 'red'"):
        two.set_weights({"rde/x": np.zeros(1)})
    three = make(3)
    three.set_state(one.get_state())
    obs = at(5, 1)
    assert three.policy.version == one.policy.version
    for agent in AGENTS:
        assert three.compute_action(obs, True, agent) == one.compute_action(obs, True, agent)


def test_two_policies_learn_opposite_things(serve):
    """Red earns by action 0, blue by action 2, in the same place; together they find that out, apart."""

    def play(env):
        while True:
            env.start_episode()
            for _ in range(8):
                actions = env.get_action({agent: at(0, 0) for agent in AGENTS})
                env.log_returns(
                    {agent: float(action == (2 if agent == "b" else 0)) for agent, action in actions.items()}
                )
            env.end_episode({agent: at(0, 0) for agent in AGENTS})

    def quick(*spaces, seed=0):
        return PPOPolicy(*spaces, PPOSettings(learning_rate=0.02, gamma=0.0), seed)

    ev = serve(Match(play), {"red": quick, "blue": quick}, policy_mapping_fn=NAMES.get, rollout_fragment_length=96)
    settings = SyncSamplesSettings(num_sgd_iter=4, minibatch_size=32, standardize_fields=("advantages",))
    optimizer = SyncSamplesOptimizer(EvaluatorSet(ev), settings)
    for _ in range(20):
        stats = optimizer.step()
    assert {"red/loss", "blue/loss"} <= set(stats)
    assert [ev.compute_action(at(0, 0), agent=agent) for agent in AGENTS] == [0, 2, 0]
    obs = np.zeros((1, 2), np.float32)
    for name, action in (("red", 0), ("blue", 2)):
        assert np.exp(ev.policy.policies[name].logp(obs, np.array([action]))[0]) > 0.8


class Duel(MultiAgentServingEnv):
    """Two agents play episodes of three and four steps, without end."""

    def run(self):
        try:
            for number in itertools.count():
                self.start_episode()
                for k in range(3):
                    self.get_action({agent: at(number % 9, k) for agent in "ab"})
                    self.log_returns({"a": 1.0, "b": 2.0})
                self.end_agents({"a": at(number % 9, 3)})
                self.get_action({"b": at(number % 9, 3)})
                self.end_episode({"b": at(number % 9, 4)}, truncated=True)
        except ServingError:
            if not self.over:
                raise


REFUSED = {"async samples with loaders": "cannot be trained from loaded rows", "multi gpu": "cannot be trained from"}
REFUSED["microbatch"] = "train them with SyncSamplesOptimizer"


@pytest.mark.parametrize(("name", "num_workers"), SETS, ids=[f"{name} {workers}" for name, workers in SETS])
def test_every_optimizer_trains_several_policies_or_says_that_it_does_not(name, num_workers):
    policy, make_optimizer = OPTIMIZERS[name]

    def make(index):
        return CommonPolicyEvaluator(
            Duel(*SPACES, ["a", "b"]),
            {"red": policy, "blue": policy},
            policy_mapping_fn={"a": "red", "b": "blue"}.get,
            worker_index=index,
            rollout_fragment_length=6,
            sample_queue_full="wait",
        )

    with EvaluatorSet.create(make, num_workers, ThreadEngine()) as evaluators:
        if name in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[name]):
                make_optimizer(evaluators)
            return
        before = evaluators.local.get_weights()
        with make_optimizer(evaluators) as optimizer:
            deadline, seen = time.monotonic() + 60.0, set()
            while not {"red/loss", "blue/loss"} <= seen:
                assert time.monotonic() < deadline, seen
                seen |= set(optimizer.step())
            assert optimizer.num_steps_trained > 0
        after = evaluators.local.get_weights()
        changed = {key.partition("/")[0] for key in after if not np.array_equal(after[key], before[key])}
        assert changed == {"red", "blue"}


def test_td_errors_come_back_in_the_order_of_the_rows(serve):
    """Prioritised replay gives each row's to its place; 0 for those nobody learns from."""
    options = {"policy_mapping_fn": NAMES.get, "policies_to_train": ["blue"], **ALL}
    ev = serve(Match(play_three), {"red": DQNPolicy, "blue": DQNPolicy}, **options)
    batch = ev.sample()
    columns = ("obs", "actions", "rewards", "terminated", "next_obs", "agent_id", "nstep_returns", "nstep_discounts")
    rows = SampleBatch({name: batch[name] for name in columns}).select(np.array([6, 0, 4, 2, 5]))
    rows["replay_id"] = np.arange(5)
    alone = DQNPolicy(OBS_SPACE, ACTION_SPACE, seed=5)
    alone.set_state(ev.policy.policies["blue"].get_state())
    expected = alone.learn(rows.select(np.array([0, 2, 4])))["td_errors"]
    errors = ev.compute_apply(rows)["td_errors"]
    assert errors.tolist() == [expected[0], 0, expected[1], 0, expected[2]]
    assert (expected != 0).all()


# ---------------------------------------------------------------------- what cannot work


def test_what_cannot_work_is_told_at_once(serve):
    two = {"red": RuledPolicy, "blue": RuledPolicy}
    for env, policy, options, words in (
        (Match(), two, {}, "policy_mapping_fn says which agent has which"),
        (Match(), RuledPolicy, {"policy_mapping_fn": str}, "are for several policies: give a dict"),
        (Match(), RuledPolicy, {"policies_to_train": ["red"]}, "are for several policies: give a dict"),
        (Match(), two, {"policy_mapping_fn": str}, "unknown policy 'a'"),
        (Match(), two, {"policy_mapping_fn": NAMES.get, "policies_to_train": ["blu"]}, "did you mean 'blue'"),
        (Match(), two, {"policy_mapping_fn": NAMES.get, "policies_to_train": "red"}, r"such as \['red'\]"),
        (Match(), {"a/b": RuledPolicy}, {"policy_mapping_fn": lambda _: "a/b"}, "without a slash"),
        (Match(), {"red": RuledPolicy, "blue": 3}, {"policy_mapping_fn": NAMES.get}, "not int"),
        (Match(), {"red": ppo, "blue": Bare}, {"policy_mapping_fn": NAMES.get}, "'blue' adds the columns {}"),
        (Player(), two, {"policy_mapping_fn": NAMES.get}, "this env has one agent"),
    ):
        with pytest.raises(ConfigError, match=words):
            serve(env, policy, **options)
    with pytest.raises(ConfigError, match="this env has one agent"):
        CommonPolicyEvaluator("CartPole-v1", two, policy_mapping_fn=NAMES.get)


def test_policies_of_different_spaces_are_refused_with_both_named():
    own, longer = Box(-1, 1, (2,), np.float32), Box(-1, 1, (3,), np.float32)
    two, three = Discrete(2), Discrete(3)
    for red, blue, words in (
        ((own, two), (longer, two), r"policy 'blue' has the observation_space Box\(.*\(3,\), .*'red' Box\(.*\(2,\), "),
        ((own, two), (own, three), r"policy 'blue' has the action_space Discrete\(3\), 'red' Discrete\(2\): "),
    ):
        policies = {"red": RandomPolicy(*red, seed=0), "blue": RandomPolicy(*blue, seed=1)}
        with pytest.raises(ConfigError, match=words):
            PolicyGroup(policies, ["red", "blue"])


class Bare(RuledPolicy):
    extra_columns = {}  # noqa: RUF012


def test_without_an_agent_nobody_knows_which_policy(serve):
    ev = serve(Match(), {"red": RuledPolicy, "blue": Other}, policy_mapping_fn=NAMES.get)
    with pytest.raises(ConfigError, match="which one it is depends on the agent"):
        ev.compute_action(at(1, 0))
    assert [ev.compute_action(at(1, 0), agent=agent) for agent in AGENTS] == [1, 2, 1]
    with pytest.raises(ConfigError, match="unknown agent 'd'"):
        ev.compute_action(at(1, 0), agent="d")
    with pytest.raises(ConfigError, match="by their column 'agent_id'; this batch has obs"):
        ev.policy.learn(SampleBatch({"obs": np.zeros((1, 2), np.float32)}))
    assert isinstance(ev.policy, PolicyGroup)
