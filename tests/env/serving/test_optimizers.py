"""A served env under every optimizer: each row sampled once and in order, counts counted, answers while learning."""

import functools
import itertools
import threading
import time

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlsample.engine import ThreadEngine
from rlsample.evaluation import Callbacks, CommonPolicyEvaluator, EvaluatorSet
from rlsample.optimizers import (
    AsyncGradientsOptimizer,
    AsyncGradientsSettings,
    AsyncReplayOptimizer,
    AsyncReplaySettings,
    AsyncSamplesOptimizer,
    AsyncSamplesSettings,
    MicrobatchOptimizer,
    MicrobatchSettings,
    MultiGPUOptimizer,
    MultiGPUSettings,
    SyncBatchReplayOptimizer,
    SyncBatchReplaySettings,
    SyncReplayOptimizer,
    SyncReplaySettings,
    SyncSamplesOptimizer,
    SyncSamplesSettings,
)
from rlsample.policy import A2CPolicy, DQNPolicy, IMPALAPolicy, PPOPolicy
from tests.env.serving.conftest import LIMIT_S, Player, at, outcome

SPACES = (Box(-1e6, 1e6, (2,), np.float32), Discrete(3))
LENGTHS = (4, 1, 7, 2)
FRAGMENT = 6
REPLAY = {"learning_starts": 12, "buffer_size": 60, "train_batch_size": 8}

OPTIMIZERS = {
    "sync samples": (
        PPOPolicy,
        lambda e: SyncSamplesOptimizer(
            e, SyncSamplesSettings(num_sgd_iter=2, minibatch_size=5, standardize_fields=("advantages",))
        ),
    ),
    "async gradients": (A2CPolicy, lambda e: AsyncGradientsOptimizer(e, AsyncGradientsSettings(grads_per_step=3))),
    "async samples": (IMPALAPolicy, lambda e: AsyncSamplesOptimizer(e, AsyncSamplesSettings(train_batch_size=12))),
    "async samples with loaders": (
        IMPALAPolicy,
        lambda e: AsyncSamplesOptimizer(e, AsyncSamplesSettings(train_batch_size=12, num_data_loader_buffers=2)),
    ),
    "sync replay": (DQNPolicy, lambda e: SyncReplayOptimizer(e, SyncReplaySettings(**REPLAY))),
    "sync batch replay": (
        A2CPolicy,
        lambda e: SyncBatchReplayOptimizer(
            e, SyncBatchReplaySettings(learning_starts=12, buffer_size=60, train_batch_size=12)
        ),
    ),
    "async replay": (DQNPolicy, lambda e: AsyncReplayOptimizer(e, AsyncReplaySettings(**REPLAY))),
    "multi gpu": (
        PPOPolicy,
        lambda e: MultiGPUOptimizer(e, MultiGPUSettings(train_batch_size=12, num_sgd_iter=2, minibatch_size=4)),
    ),
    "microbatch": (
        PPOPolicy,
        lambda e: MicrobatchOptimizer(e, MicrobatchSettings(train_batch_size=12, microbatch_size=5)),
    ),
}
ASYNC = ("async gradients", "async samples", "async samples with loaders", "async replay")
SETS = [(name, workers) for name in OPTIMIZERS for workers in (0, 2) if workers or name not in ASYNC]


def script():
    """(episode, step, reward, last) of every row that a client's episodes make, for ever."""
    for episode in itertools.count(1):
        length = LENGTHS[episode % len(LENGTHS)]
        for step in range(length):
            yield episode, step, float(10 * episode + step), step == length - 1


def play(env):
    """One client that follows the script until the env is closed."""
    try:
        for episode, step, reward, last in script():
            if step == 0:
                env.start_episode()
            env.get_action(at(episode, step))
            env.log_returns(reward)
            if last:
                env.end_episode(at(episode, step + 1), truncated=episode % 2 == 0)
    except Exception:
        if not env.over:
            raise


class Keeps(Callbacks):
    """The rows of every sample, in order."""

    def __init__(self):
        self.rows = []
        self.counts = []

    def on_sample_end(self, evaluator, batch):
        columns = (batch[name].tolist() for name in ("obs", "rewards", "terminated", "truncated"))
        self.rows += list(zip(*columns, strict=True))
        self.counts.append(batch.count)


class ServedSet:
    """Evaluators of served envs, made by index; index 0 is the local one."""

    def __init__(self, policy, workers, play=play, **options):
        self.made = {}
        options = {"rollout_fragment_length": FRAGMENT, "sample_queue_full": "wait", **options}

        def make(index):
            callbacks = Keeps()
            made = CommonPolicyEvaluator(
                Player(play, spaces=SPACES), policy, seed=1, worker_index=index, callbacks=callbacks, **options
            )
            self.made[index] = made
            return made

        self.evaluators = EvaluatorSet.create(make, workers, ThreadEngine())

    def sampling(self):
        """The evaluators that sample."""
        return [made for index, made in self.made.items() if index or len(self.made) == 1]


@pytest.mark.parametrize(("name", "num_workers"), SETS, ids=[f"{name} {workers}" for name, workers in SETS])
def test_every_optimizer_trains_from_served_episodes(name, num_workers):
    policy, make_optimizer = OPTIMIZERS[name]
    served = ServedSet(policy, num_workers)
    with served.evaluators as evaluators, make_optimizer(evaluators) as optimizer:
        deadline = time.monotonic() + 30
        steps = 0
        while steps < 4 or not optimizer.num_steps_trained:
            stats = optimizer.step()
            assert all(np.isfinite(value) for value in stats.values()), stats
            assert time.monotonic() < deadline, "nothing was learnt"
            steps += 1
        counts = [made.callbacks.counts for made in served.sampling()]
        if name not in ASYNC:
            assert optimizer.num_steps_sampled == sum(map(sum, counts))
            assert all(len(c) == len(counts[0]) for c in counts)
        assert served.made[0].policy.version > 0
    assert optimizer.num_steps_sampled % FRAGMENT == 0
    assert 0 < optimizer.num_steps_sampled <= sum(sum(made.callbacks.counts) for made in served.sampling())
    for made in served.sampling():
        rows, counts = made.callbacks.rows, made.callbacks.counts
        assert set(counts) == {FRAGMENT}
        assert sorted(rows) == [
            ([episode, step], reward, last and episode % 2 == 1, last and episode % 2 == 0)
            for episode, step, reward, last in itertools.islice(script(), len(rows))
        ], "lost, doubled or changed"
    assert not any(made.env.env.is_alive() for made in served.made.values())
    if num_workers:
        assert served.made[0].env.env.ident is None, "the local one only learns: its clients never began"


# ---------------------------------------------------------------------- inference does not wait for training


class Held:
    """Its update lasts until it is let go."""

    learning, go = threading.Event(), threading.Event()

    def learn(self, batch):
        self.learning.set()
        assert self.go.wait(LIMIT_S)
        return super().learn(batch)


class HeldPPO(Held, PPOPolicy):
    pass


class HeldIMPALA(Held, IMPALAPolicy):
    pass


@pytest.mark.parametrize(
    ("policy", "make_optimizer", "num_workers"),
    [
        (HeldPPO, SyncSamplesOptimizer, 0),
        (HeldPPO, SyncSamplesOptimizer, 1),
        (HeldIMPALA, functools.partial(AsyncSamplesOptimizer, settings=AsyncSamplesSettings(train_batch_size=12)), 1),
    ],
)
def test_actions_are_answered_while_the_learner_is_in_an_update(policy, make_optimizer, num_workers, workers):
    """Also more of them than all queues hold: what nobody takes in time is dropped, and counted."""
    Held.learning.clear()
    Held.go.clear()
    asks, answered = threading.Semaphore(0), threading.Semaphore(0)

    def on_demand(env):
        env.start_episode()
        for step in itertools.count():
            asks.acquire()
            if env.over:
                return
            env.get_action(at(1, step))
            env.log_returns(1)
            answered.release()

    served = ServedSet(policy, num_workers, on_demand, sample_queue_full="drop_oldest")
    with served.evaluators as evaluators:
        optimizer = make_optimizer(evaluators)
        try:
            asks.release(50)
            training = workers(1)[0].begin(optimizer.step)
            assert Held.learning.wait(LIMIT_S)
            for _ in range(50):
                assert answered.acquire(timeout=LIMIT_S)
            for _ in range(200):  # one at a time: each was asked during the update
                asks.release()
                assert answered.acquire(timeout=LIMIT_S), "no answer while the learner computes"
            assert not training["done"].is_set()
            assert served.made[0].policy.version == 0
            Held.go.set()
            assert outcome(training)
            assert served.made[0].policy.version > 0
        finally:
            Held.go.set()
            for made in served.made.values():
                made.env.env.interrupt = functools.partial(asks.release, 10)
            optimizer.close()
    assert not any(made.env.env.is_alive() for made in served.made.values())
