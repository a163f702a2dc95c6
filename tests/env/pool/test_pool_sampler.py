"""The pool under a sampler: ordered it gives the inline batches, first come every slot's own game."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rlsample.errors import EnvFailedError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy import RandomPolicy
from rlsample.testing.faulty_env import Fault, faulty_factory
from rlsample.testing.scripted_policy import ScriptedPolicy
from rlsample.tree import flatten

FORK = {"start_method": "fork", "num_workers": 2}


def evaluator(env, num_envs, pool=None, policy=RandomPolicy, **options):
    if pool is not None:
        options.update(backend="process", pool={**FORK, **pool})
    return CommonPolicyEvaluator(env, policy, num_envs, seed=5, **options)


def content(batch):
    found = {}
    for name in sorted(batch.keys()):
        for path, leaf in flatten(batch[name]):
            found[name, path] = (leaf.dtype.str, leaf.shape, leaf.tobytes())
    for path, leaf in flatten(batch["next_obs"]):
        found["next_obs", path] = leaf.tobytes()
    return found


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("pool", [{}, {"reset_ahead": False}])
def test_an_ordered_pool_gives_the_batches_of_the_inline_loop(batch_mode, pool):
    options = {"rollout_fragment_length": 40, "batch_mode": batch_mode, "vectorize": "loop"}
    batches = []
    for backend in (None, pool):
        with evaluator("CartPole-v1", 5, backend, **options) as ev:
            batches.append([content(ev.sample()) for _ in range(5)] + [ev.get_metrics().__repr__()])
    assert batches[0] == batches[1]


@pytest.mark.parametrize("pool", [{"ordered": False}, {"batch_size": 3}, {"groups": 2}])
def test_a_pool_that_works_ahead_gives_every_slot_its_own_game(pool):
    with evaluator(faulty_factory(n=5), 6, pool, ScriptedPolicy, rollout_fragment_length=10) as ev:
        batches = [ev.sample() for _ in range(6)]
        metrics = ev.get_metrics()
    for batch in batches:
        assert batch.count >= 60
    assert {(m.length, m.episode_return) for m in metrics} == {(5, 15.0)}
    for slot in range(6):
        t = np.concatenate([b["t"][b["env_id"] == slot] for b in batches])
        obs = np.concatenate([b["obs"][b["env_id"] == slot] for b in batches]).ravel()
        next_obs = np.concatenate([b["next_obs"][b["env_id"] == slot] for b in batches]).ravel()
        ends = np.concatenate([b["terminated"][b["env_id"] == slot] for b in batches])
        assert t.tolist() == (list(range(5)) * len(t))[: len(t)]
        assert obs.tolist() == t.tolist()
        assert next_obs.tolist() == (t + 1).tolist()
        assert ends.tolist() == (t == 4).tolist()


def test_groups_make_the_same_batches_every_time():
    batches = []
    for _ in range(2):
        with evaluator("CartPole-v1", 6, {"groups": 2}, rollout_fragment_length=20) as ev:
            batches.append([content(ev.sample()) for _ in range(5)])
    assert batches[0] == batches[1]


@pytest.mark.parametrize(("groups", "under_way"), [(1, 0), (2, 2)])
def test_one_group_is_stepped_while_the_other_is_acted_on(groups, under_way):
    seen = []

    class Watching(RandomPolicy):
        def act(self, obs, explore=True):
            seen.append((len(obs), len(ev.env._requests.owing(range(4)))))
            return super().act(obs, explore)

    make = faulty_factory(n=10**6)
    with evaluator(make, 4, {"groups": groups}, Watching, rollout_fragment_length=5) as ev:
        ev.sample()
    assert len(seen) >= 5 * groups
    assert set(seen[2:]) == {(4 // groups, under_way)}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", ["raise", "exit", "kill"])
def test_case_21_a_failed_env_is_restarted_and_its_episode_is_a_cut(kind, ordered):
    make = faulty_factory({1: Fault(kind, at=3)}, n=5)
    options = {"rollout_fragment_length": 10, "max_restarts": 1, "restart_backoff_s": 0.0}
    with evaluator(make, 3, {"num_workers": 3, "ordered": ordered}, ScriptedPolicy, **options) as ev:
        batches, metrics = [], []
        while not all(sum(m.env_id == slot for m in metrics) >= 2 for slot in range(3)):
            batches.append(ev.sample())
            metrics += ev.get_metrics()
        assert ev.sampler.rows_lost == 1
    assert {(m.length, m.episode_return) for m in metrics} == {(5, 15.0)}

    def column(name, slot):
        return np.concatenate([b[name][b["env_id"] == slot] for b in batches])

    for slot in (0, 2):
        t = column("t", slot)
        assert t.tolist() == (list(range(5)) * len(t))[: len(t)]
    t = column("t", 1)
    assert t[:7].tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert column("obs", 1).ravel().tolist() == t.tolist()
    assert column("next_obs", 1).ravel().tolist() == (t + 1).tolist()
    assert len(set(column("eps_id", 1)[[0, 2, 6]].tolist())) == 2
    assert not column("terminated", 1)[:6].any()
    assert not column("truncated", 1)[:6].any()


@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", "slot 2, episode step 4: step raised RuntimeError: broken on purpose"),
        ("exit", "slot 2, episode step 4: worker 2 exited with code 3 in this env"),
        ("kill", "slot 2, episode step 4: worker 2 was killed by SIGKILL in this env"),
        ("hang", "slot 2, episode step 4: worker 2 took more than step_timeout_s=0.5 and was killed in this env"),
    ],
)
def test_case_23_past_the_budget_sample_raises(kind, said, max_restarts):
    make = faulty_factory({2: Fault(kind, at=4, incarnations=9)})
    options = {"rollout_fragment_length": 10, "max_restarts": max_restarts, "restart_backoff_s": 0.0}
    with evaluator(make, 3, {"num_workers": 3, "step_timeout_s": 0.5}, ScriptedPolicy, **options) as ev:
        started = time.monotonic()
        with pytest.raises(EnvFailedError) as caught:
            ev.sample()
        assert time.monotonic() - started < 10
    where = "in worker 2; " if kind == "raise" else ""  # the others name it anyway
    assert str(caught.value) == f"{said} ({where}no restart left: max_restarts={max_restarts})"
    assert (caught.value.slot, caught.value.episode_step) == (2, 4)
    assert ("in strike" if kind == "raise" else "worker 2") in caught.value.remote_traceback


def test_a_whole_worker_that_dies_while_lanes_are_full_is_no_trouble():
    """Slots out of step: some lanes are full and their slots idle when the worker dies."""
    faults = {0: Fault("raise", at=2), 1: Fault("exit", at=9), 4: Fault("raise", at=5)}
    options = {"rollout_fragment_length": 6, "max_restarts": 3, "restart_backoff_s": 0.0}
    with evaluator(faulty_factory(faults, n=4), 5, {"num_workers": 2}, ScriptedPolicy, **options) as ev:
        batches = [ev.sample() for _ in range(8)]
        metrics = ev.get_metrics()
        assert ev.sampler.rows_lost >= 3
    assert {(m.length, m.episode_return) for m in metrics} == {(4, 10.0)}
    for batch in batches:
        assert batch.count == 30
        assert (batch["obs"].ravel() == batch["t"]).all()
        assert (batch["next_obs"].ravel() == batch["t"] + 1).all()
        assert (batch["terminated"] == (batch["t"] == 3)).all()


def test_closing_the_evaluator_closes_the_pool(tmp_path):
    log = tmp_path / "calls"
    ev = evaluator(faulty_factory(log=log), 4, {}, ScriptedPolicy, rollout_fragment_length=3)
    ev.sample()
    ev.close()
    ev.close()
    assert log.read_text().split().count("close") == 4
