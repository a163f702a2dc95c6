"""Synchronous replay: what is added, drawn, learned and counted; priorities go to the rows that were learned on."""

import functools
import pickle

import numpy as np
import pytest

from rlsample.engine import InlineEngine, ProcessEngine, ProcessSettings, ThreadEngine
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.optimizers import (
    SyncBatchReplayOptimizer,
    SyncBatchReplaySettings,
    SyncReplayOptimizer,
    SyncReplaySettings,
)
from rlsample.policy import DQNPolicy, DQNSettings, ModelSettings
from rlsample.testing.optimizer_rules import OPTIMIZER_RULES, check_optimizer
from rlsample.testing.row_evaluator import RowEvaluator


class Learner(RowEvaluator):
    """Keeps what it learned on; its TD error of a row is that row's id."""

    def __init__(self, worker_index=0, sizes=(7, 13, 5), errors=True):
        super().__init__(worker_index, sizes)
        self.errors, self.learned, self.progress = errors, [], []

    def compute_apply(self, samples):
        self.learned.append({name: np.copy(samples[name]) for name in samples})
        stats = super().compute_apply(samples)
        return {**stats, "td_errors": samples["id"].astype(np.float32)} if self.errors else stats

    def set_progress(self, env_steps):
        self.progress.append(env_steps)


def run(steps, learner=None, seed=0, **options):
    learner = learner or Learner()
    settings = SyncReplaySettings(**{"learning_starts": 20, "buffer_size": 30, "train_batch_size": 8, **options})
    optimizer = SyncReplayOptimizer(EvaluatorSet(learner), settings, seed)
    return optimizer, learner, [optimizer.step() for _ in range(steps)]


def test_learning_starts_with_enough_rows_and_counts_are_counted():
    optimizer, learner, stats = run(4, updates_per_step=2)
    assert optimizer.num_steps_sampled == 7 + 13 + 5 + 7
    assert [bool(s) for s in stats] == [False, True, True, True]
    assert [len(batch["id"]) for batch in learner.learned] == [8] * 6
    assert optimizer.num_steps_trained == 48
    assert learner.progress == [7, 20, 25, 32]
    assert stats[1]["loss"] == pytest.approx(np.mean([batch["id"].mean() for batch in learner.learned[:2]]))
    assert set(stats[1]) == {"loss"}


def test_rows_are_whole_and_from_the_newest_ones():
    _, learner, _ = run(60)
    oldest_seen = []
    for step, batch in enumerate(learner.learned, start=2):
        sampled = sum((7, 13, 5)[i % 3] for i in range(step))
        ids = batch["id"]
        assert (ids < sampled).all()
        assert (ids >= sampled - 30).all()
        oldest_seen.append(sampled - ids.min())
        assert batch["obs"][:, 0].tolist() == ids.tolist()
        assert batch["next_obs"][:, 0].tolist() == (ids + 1).tolist()
        assert batch["rewards"].tolist() == (ids % 5).tolist()
    assert max(oldest_seen) > 20


def test_errors_become_the_priorities_of_the_rows_that_were_learned_on():
    optimizer, learner, _ = run(2, prioritized_replay_alpha=1.0)
    for _ in range(3):
        optimizer._update()
    last = {}
    for batch in learner.learned:
        last.update({int(i): float(i) for i in batch["id"]})
    expected = [last.get(i) for i in range(20)]
    got = optimizer.buffer.get_state()["priorities"]
    for i in range(20):
        if expected[i] is not None:
            assert got[i] == pytest.approx(expected[i] + 1e-6)
        else:
            assert got[i] == 1.0  # as it came: nothing larger was known
    assert len(last) > 8


def test_weights_use_the_annealed_beta():
    options = {"prioritized_replay_beta": 0.0, "final_prioritized_replay_beta": 1.0, "beta_annealing_steps": 40}
    optimizer, learner, _ = run(1, **options)
    sample, betas = optimizer.buffer.sample, []
    optimizer.buffer.sample = lambda size, beta: betas.append(beta) or sample(size, beta)
    for _ in range(5):
        optimizer.step()
    assert betas == [0.5, 0.625, 0.8, 1.0, 1.0]  # after 20, 25, 32, 45, 50 rows
    assert learner.learned[-1]["weights"].min() < 1


def test_uniform_replay_and_evaluators_without_errors(caplog):
    _, learner, _ = run(5, prioritized_replay=False)
    assert "weights" not in learner.learned[0]
    assert "replay_id" in learner.learned[0]
    assert not caplog.records
    optimizer, learner, _ = run(5, Learner(errors=False))
    assert [r.message for r in caplog.records if "td_errors" in r.message] == [caplog.records[0].message]
    assert set(optimizer.buffer.get_state()["priorities"].tolist()) == {1.0}


def test_a_batch_can_be_changed_before_learning():
    learner = Learner()
    optimizer = SyncReplayOptimizer(
        EvaluatorSet(learner),
        SyncReplaySettings(learning_starts=1, train_batch_size=8),
        before_learn_on_batch=lambda batch: batch.slice(0, 3),
    )
    optimizer.step()
    assert len(learner.learned[0]["id"]) == 3 == optimizer.num_steps_trained


def test_all_remote_evaluators_sample_and_get_the_weights():
    local, a, b = Learner(), Learner(1), Learner(2, sizes=(4, 2))
    settings = SyncReplaySettings(learning_starts=1, buffer_size=50, train_batch_size=40, prioritized_replay=False)
    optimizer = SyncReplayOptimizer(EvaluatorSet(local, [a, b]), settings)
    optimizer.step()
    optimizer.step()
    assert optimizer.num_steps_sampled == 7 + 4 + 13 + 2
    drawn = set(local.learned[1]["id"].tolist())
    assert {i // 1_000_000 for i in drawn} == {1, 2}
    np.testing.assert_array_equal(a.weights, b.weights)
    assert a.weights[1] == 1  # those of after the first update


@pytest.mark.parametrize("stored", [True, False])
def test_saving_with_and_without_the_buffer(stored):
    optimizer, learner, _ = run(5, store_buffer_in_checkpoints=stored)
    state = pickle.loads(pickle.dumps(optimizer.save()))
    again = Learner()
    again._next_id, again.num_samples = learner._next_id, learner.num_samples
    resumed = SyncReplayOptimizer(EvaluatorSet(again), optimizer.settings, seed=7)
    resumed.restore(state)
    assert resumed.num_steps_trained == 32
    optimizer.step()
    resumed.step()
    if stored:
        assert again.learned[0]["id"].tolist() == learner.learned[-1]["id"].tolist()
    else:
        assert again.learned == []  # 5 rows are not enough to begin
    assert resumed.num_steps_sampled == optimizer.num_steps_sampled


def test_batch_replay_keeps_whole_samples_in_order_and_never_too_many():
    learner = Learner()
    settings = SyncBatchReplaySettings(learning_starts=20, buffer_size=30, train_batch_size=10)
    optimizer = SyncBatchReplayOptimizer(EvaluatorSet(learner), settings)
    seen = set()
    for step in range(40):
        optimizer.step()
        assert optimizer.num_rows_kept <= 30
        if step == 0:
            assert learner.learned == []
            continue
        ids = learner.learned[-1]["id"]
        sampled = optimizer.num_steps_sampled
        assert len(ids) >= 10
        assert ids.min() >= sampled - 30
        cuts = np.flatnonzero(np.diff(ids) != 1) + 1
        for part in np.split(ids, cuts):  # each part is a whole sample, or several that happen to be neighbours
            assert part[0] % 25 in (0, 7, 20)
            assert (part[-1] + 1) % 25 in (0, 7, 20)
            seen.add(len(part))
    assert {5, 7, 13} <= seen
    assert optimizer.num_steps_trained == sum(len(batch["id"]) for batch in learner.learned)


def test_batch_replay_learns_although_whole_samples_never_fill_the_buffer():
    settings = SyncBatchReplaySettings(learning_starts=10, buffer_size=10, train_batch_size=5)
    optimizer = SyncBatchReplayOptimizer(EvaluatorSet(RowEvaluator(sizes=(7,))), settings)
    assert [bool(optimizer.step()) for _ in range(3)] == [False, True, True]
    assert optimizer.num_rows_kept == 7


def test_a_sample_larger_than_the_buffer():
    optimizer = SyncBatchReplayOptimizer(
        EvaluatorSet(RowEvaluator(sizes=(7, 13))), SyncBatchReplaySettings(learning_starts=5, buffer_size=12)
    )
    optimizer.step()
    with pytest.raises(ConfigError, match="13 rows"):
        optimizer.step()
    assert (optimizer.num_steps_sampled, optimizer.num_rows_kept) == (20, 7)


OPTIMIZERS = {
    "replay": lambda e: SyncReplayOptimizer(e, SyncReplaySettings(learning_starts=20, train_batch_size=8)),
    "uniform": lambda e: SyncReplayOptimizer(
        e, SyncReplaySettings(learning_starts=1, train_batch_size=8, prioritized_replay=False, updates_per_step=3)
    ),
    "batches": lambda e: SyncBatchReplayOptimizer(e, SyncBatchReplaySettings(learning_starts=20)),
}
NO_PROCESSES = {8: "workers are no processes"}


@pytest.mark.parametrize("engine", [InlineEngine, ThreadEngine])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_conformance(name, engine):
    report = check_optimizer(OPTIMIZERS[name], Learner, make_engine=engine)
    assert report == {**dict.fromkeys(OPTIMIZER_RULES, "ok"), **NO_PROCESSES}


@pytest.mark.parametrize("name", ["replay", "batches"])
def test_an_evaluator_is_killed_in_the_middle_of_a_sample(name):
    engine = functools.partial(ProcessEngine, ProcessSettings(close_timeout_s=1.0))
    assert check_optimizer(OPTIMIZERS[name], RowEvaluator, [8], make_engine=engine, mortal=True) == {8: "ok"}


def make_cartpole(worker_index):
    def policy(observation_space, action_space, seed):
        settings = DQNSettings(model=ModelSettings(hidden=(8,)), n_step=3)
        return DQNPolicy(observation_space, action_space, settings, seed)

    return CommonPolicyEvaluator("CartPole-v1", policy, 2, worker_index=worker_index, rollout_fragment_length=4)


@pytest.mark.parametrize("name", ["replay", "uniform"])
def test_over_an_env_and_dqn(name):
    rules = [1, 2, 3, 5, 6]
    report = check_optimizer(OPTIMIZERS[name], make_cartpole, rules, make_engine=InlineEngine)
    assert report == dict.fromkeys(rules, "ok")


@pytest.mark.parametrize(
    "options", [{"updates_per_step": 0}, {"buffer_size": 0}, {"train_batch_size": 0}, {"learning_starts": 20_000}]
)
def test_impossible_settings(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SyncReplaySettings(**options)


def test_a_run_resumes_bit_for_bit_with_its_buffer():
    settings = SyncReplaySettings(learning_starts=20, train_batch_size=8, store_buffer_in_checkpoints=True)
    with EvaluatorSet(make_cartpole(0)) as first, EvaluatorSet(make_cartpole(0)) as second:
        a, b = SyncReplayOptimizer(first, settings, seed=1), SyncReplayOptimizer(second, settings, seed=2)
        for _ in range(8):
            a.step()
        b.restore(pickle.loads(pickle.dumps(a.save())))
        second.local.set_state(pickle.loads(pickle.dumps(first.local.get_state())))
        for _ in range(8):
            assert a.step() == b.step()
        for name, weights in first.local.get_weights().items():
            np.testing.assert_array_equal(weights, second.local.get_weights()[name])
