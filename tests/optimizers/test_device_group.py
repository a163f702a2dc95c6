"""Several devices train as one does: the same updates, every row once, and nobody waits for the dead."""

import dataclasses
import os
import signal
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlsample.errors import ConfigError, LearnerError
from rlsample.optimizers.device_group import DeviceGroup, DeviceSettings
from rlsample.optimizers.multi_device_support import MultiDeviceSupport, find_support
from rlsample.optimizers.shards import fragment_minibatches, row_minibatches
from rlsample.policy import IMPALAPolicy, IMPALASettings, ModelSettings, PPOPolicy, PPOSettings
from rlsample.sample_batch import SampleBatch

from .conftest import Bare

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL = ModelSettings(hidden=(8,))


def ppo(seed=1, **options):
    settings = PPOSettings(model=SMALL, learning_rate=0.01, **options)
    return PPOPolicy(Box(-9, 9, (2,), np.float32), Discrete(3), settings, seed)


def impala(seed=1):
    settings = IMPALASettings(model=SMALL, learning_rate=0.01)
    return IMPALAPolicy(Box(-9, 9, (2,), np.float32), Discrete(3), settings, seed)


def learnable(batch):
    """The batch with small observations and all columns that PPO and IMPALA learn from, each row its own."""
    rng = np.random.default_rng(batch.count)
    nxt = dataclasses.replace(batch.next_obs_source, extra=batch.next_obs_source.extra / 50)
    columns = {
        "obs": batch["obs"] / 50,
        "actions": batch["actions"] % 3,
        "rewards": batch["rewards"] / 50,
        "terminated": batch["terminated"],
        **{name: rng.normal(size=batch.count).astype(np.float32) / 2 - 1 for name in ("action_logp", "values")},
        **{name: rng.normal(size=batch.count).astype(np.float32) for name in ("advantages", "value_targets")},
    }
    return SampleBatch(columns, nxt, batch.fragment_lengths)


def assert_close(got, wanted, tolerance=1e-6):
    assert set(got) == set(wanted)
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize("make", [ppo, impala])
def test_one_device_is_learn_on_the_same_rows(make, make_batch):
    batches = [learnable(make_batch(1, [5, 3])), learnable(make_batch(30, [4], "terminated"))]
    theirs, mine = make(), make()
    with DeviceGroup(mine.multi_device_support()) as group:
        for _ in range(3):
            stats = theirs.learn(SampleBatch.concat(batches))
            assert group.load(0, batches) == 12
            (got,), rows = group.train_pass(0)
            assert rows == 12
            assert got == pytest.approx(stats, rel=1e-4, abs=1e-5)
    assert_close(mine.get_weights(), theirs.get_weights())


@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ppo_on_several_devices_is_the_single_device_update(num_devices, make_batch):
    batches = [learnable(make_batch(1, [8])), learnable(make_batch(30, [16, 8]))]
    rows = SampleBatch.concat(batches)
    single, policy = ppo(), ppo()
    share = 32 // num_devices
    with DeviceGroup(policy.multi_device_support(), DeviceSettings(("cpu",) * num_devices)) as group:
        for i in range(3):  # whole, then in minibatches
            group.load(0, batches)
            size = 0 if i == 0 else 10
            _, trained = group.train_pass(0, size, np.random.default_rng(i))
            assert trained == share * num_devices
            plan = row_minibatches(share, num_devices, size or 32, np.random.default_rng(i))
            for parts in plan:
                chosen = np.concatenate([part + share * device for device, part in enumerate(parts)])
                single.learn(rows.select(chosen))
        weights = group.weights_by_device()
    assert group.num_dropped_rows == 3 * (32 - share * num_devices)
    assert_close(policy.get_weights(), single.get_weights())
    for other in weights[1:]:
        assert_close(other, weights[0], tolerance=0)


@pytest.mark.parametrize("num_devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_impala_on_several_devices_is_the_single_device_update(num_devices, make_batch):
    batch = learnable(make_batch(1, [5, 3, 6, 2, 4, 5]))  # no equal shares: each counts by its rows
    single, policy = impala(), impala()
    with DeviceGroup(policy.multi_device_support(), DeviceSettings(("cpu",) * num_devices), num_slots=2) as group:
        for i, size in enumerate((0, 12)):
            group.load(i, [batch])
            fragments = [host.fragments for host in group._hosts[i]]
            _, trained = group.train_pass(i, size, np.random.default_rng(7))
            assert trained == 25
            starts = np.cumsum([0, *(part[:, 1].sum() for part in fragments)])
            plan = fragment_minibatches(fragments, size or 25, np.random.default_rng(7))
            for parts in plan:
                spans = [
                    part[chosen] + [[start, 0]] for part, chosen, start in zip(fragments, parts, starts, strict=False)
                ]
                pieces = [batch.slice(a, a + n) for a, n in np.concatenate(spans)]
                single.learn(SampleBatch.concat([SampleBatch(dict(p.items()), p._detached_next_obs()) for p in pieces]))
        weights = group.weights_by_device()
    assert_close(policy.get_weights(), single.get_weights())
    for other in weights[1:]:
        assert_close(other, weights[0], tolerance=0)


class Recorder:
    """A loss that writes down the ids it sees, per process; may do something bad on the way."""

    columns = ("id", "obs")
    whole_fragments = False

    def __init__(self, folder, misbehave=None):
        self.folder, self.misbehave = str(folder), misbehave
        self.module = torch.nn.Linear(1, 1)
        self.main = os.getpid()

    def loss(self, rows):
        assert torch.equal(rows["id"].float(), rows["obs"][:, 0])
        with open(f"{self.folder}/{os.getpid()}", "a") as file:
            file.write(" ".join(map(str, rows["id"].tolist())) + "\n")
        if self.misbehave and os.getpid() != self.main:
            self.misbehave()
        loss = self.module(rows["obs"][:, :1]).mean()
        return loss, {"loss": loss}

    def update(self):
        pass

    def to(self, device):
        return self


def recorded(folder):
    """Process -> lists of ids."""
    return {
        int(path.name): [[int(i) for i in line.split()] for line in path.read_text().splitlines()]
        for path in folder.iterdir()
    }


@pytest.mark.parametrize(("num_devices", "share"), [(1, 100), pytest.param(2, 50, marks=pytest.mark.slow), (3, 33)])
def test_every_device_sees_its_own_rows_case_25(tmp_path, make_batch, num_devices, share):
    recorder, rows = Recorder(tmp_path), num_devices * share
    assert isinstance(recorder, MultiDeviceSupport)
    with DeviceGroup(recorder, DeviceSettings(("cpu",) * num_devices)) as group:
        assert group.load(0, [make_batch(0, [60]), make_batch(60, [40])]) == rows
        total = sum(group.train_pass(0, 32, np.random.default_rng(i))[1] for i in range(2))
        group.weights_by_device()  # the others have done their part too
    seen = recorded(tmp_path)
    assert len(seen) == num_devices
    assert total == sum(len(ids) for lists in seen.values() for ids in lists) == 2 * rows
    assert group.num_dropped_rows == 100 - rows
    for epoch in (slice(0, 4), slice(4, 8)):  # four minibatches
        by_device = [[i for ids in lists[epoch] for i in ids] for lists in seen.values()]
        assert [len(ids) for ids in by_device] == [share] * num_devices
        assert sorted(i for ids in by_device for i in ids) == list(range(rows))


def test_a_minibatch_larger_than_the_batch_is_all_of_it(tmp_path, make_batch):
    with DeviceGroup(Recorder(tmp_path)) as group:
        group.load(0, [make_batch(0, [100])])
        results, rows = group.train_pass(0, 256)
    assert (len(results), rows) == (1, 100)
    assert recorded(tmp_path) == {os.getpid(): [list(range(100))]}


def raise_in_loss():
    raise ArithmeticError("loss-of-rank")


def die_in_loss():
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_it_fails(group):
    for _ in range(100):
        group.train_pass(0)


@pytest.mark.parametrize(("misbehave", "message"), [(raise_in_loss, "loss-of-rank"), (die_in_loss, "device 1|sum")])
def test_a_failing_device_ends_the_update(tmp_path, make_batch, misbehave, message):
    started = time.monotonic()
    with DeviceGroup(Recorder(tmp_path, misbehave), DeviceSettings(("cpu", "cpu"))) as group:
        group.load(0, [make_batch(0, [10])])
        with pytest.raises(LearnerError, match=message):
            train_until_it_fails(group)
    assert time.monotonic() - started < 20


def test_reduced_precision_is_close_and_weights_stay_float32(make_batch):
    full, half = ppo(), ppo()
    for policy, precision in ((full, "float32"), (half, "bfloat16")):
        with DeviceGroup(policy.multi_device_support(), DeviceSettings(precision=precision)) as group:
            group.load(0, [learnable(make_batch(1, [20]))])
            group.train_pass(0)
    assert half.get_weights()["policy_head.weight"].dtype == np.float32
    with pytest.raises(AssertionError):
        assert_close(half.get_weights(), full.get_weights(), 1e-7)
    assert_close(half.get_weights(), full.get_weights(), 0.05)


def test_a_loss_that_is_not_finite_changes_nothing(make_batch):
    policy = ppo()
    batch = learnable(make_batch(1, [4]))
    batch["advantages"][2] = np.nan
    before = policy.get_weights()
    with DeviceGroup(policy.multi_device_support()) as group:
        group.load(0, [batch])
        with pytest.raises(FloatingPointError, match="policy_gradient_loss is nan"):
            group.train_pass(0)
    assert_close(policy.get_weights(), before, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ()}, "devices is empty"),
        ({"devices": ("cpu", "cuda:0")}, "different kinds"),
        ({"precision": "float61"}, "precision"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        DeviceSettings(**options)


def test_a_support_that_cannot_be_pickled_is_refused(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.lock = threading.Lock()
    with pytest.raises(ConfigError, match="can be pickled"):
        DeviceGroup(recorder, DeviceSettings(("cpu", "cpu")))


def test_the_module_must_be_on_the_first_device():
    with pytest.raises(ConfigError, match="devices begin with meta, but the module is on cpu"):
        DeviceGroup(ppo().multi_device_support(), DeviceSettings(("meta",)))


def test_an_evaluator_without_the_capability_is_told_what_to_add():
    with pytest.raises(ConfigError, match=r"Bare cannot be trained from loaded rows.*multi_device_support"):
        find_support(Bare())
    half = Bare()
    half.multi_device_support = lambda: torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="without columns, whole_fragments, module, loss, update"):
        find_support(half)
    whole, evaluator = ppo(), Bare()
    evaluator.policy = whole
    assert find_support(evaluator).module is whole.model
