"""ServedSampler and the evaluator around it: every row of served episodes, whole or cut, kept or not."""

import threading

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlsample.env import ServingSettings
from rlsample.env.serving.served_episode import ServingEnded
from rlsample.errors import ConfigError, EnvClosedError, SamplerError, ServingError
from rlsample.evaluation import Callbacks, EvaluatorSet
from rlsample.optimizers import SyncSamplesOptimizer
from rlsample.policy import PPOPolicy
from rlsample.testing.scripted_policy import ScriptedPolicy
from tests.env.serving.conftest import (
    LIMIT_S,
    Picky,
    Player,
    RuledPolicy,
    answer,
    at,
    drained,
    outcome,
    rows_of,
)

BOTH_MODES = pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])


def play_episode(env, number, length, reward=lambda k: 100 + k, truncated=False, **start):
    """Asks ``length`` times and ends; checks the answers."""
    episode = env.start_episode(**start)
    for k in range(length):
        assert env.get_action(at(number, k), episode) == answer(number, k)
        env.log_returns(reward(k), episode_id=episode)
    env.end_episode(at(number, length), episode, truncated=truncated)


def expected(number, length, reward=lambda k: 100 + k, truncated=False):
    return [
        (
            (number, k),
            (number, k + 1),
            answer(number, k),
            reward(k),
            k == length - 1 and not truncated,
            k == length - 1 and truncated,
            k,
        )
        for k in range(length)
    ]


@BOTH_MODES
@pytest.mark.parametrize("fragment", [1, 3, 50])
@pytest.mark.parametrize("lanes", [1, 2])
def test_every_row_of_episodes_from_several_threads(serve, batch_mode, fragment, lanes):
    lengths = [1, 4, 2, 7, 3, 5]

    def play(env):
        def some(first):
            for number in range(first, len(lengths), 3):
                play_episode(env, number, lengths[number], truncated=number % 2 == 1)

        threads = [threading.Thread(target=some, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ev = serve(play, rollout_fragment_length=fragment, num_envs=lanes, batch_mode=batch_mode)
    batches = drained(ev)
    rows = rows_of(batches)
    by_number = {int(part[0][0][0]): part for part in rows.values()}
    assert by_number == {n: expected(n, length, truncated=n % 2 == 1) for n, length in enumerate(lengths)}
    assert len(rows) == len(lengths)
    for batch in batches:
        assert np.array_equal(batch["values"], batch["obs"][:, 1])
        assert np.allclose(batch["action_logp"], -batch["obs"][:, 0] / 8)
        assert ((batch["env_id"] >= 0) & (batch["env_id"] < 4)).all()
    returns = {m.eps_id: (m.episode_return, m.length) for m in ev.get_metrics()}
    assert returns == {e: (sum(100.0 + k for k in range(len(part))), len(part)) for e, part in rows.items()}


def test_a_batch_has_the_rows_of_its_lanes_worth(serve):
    def play(env):
        for number in range(10):
            play_episode(env, number, 10)

    ev = serve(play, rollout_fragment_length=6, num_envs=3)
    counts = [batch.count for batch in drained(ev)]
    assert counts == [18] * 5 + [10]


def test_whole_episodes_stay_whole(serve):
    def play(env):
        for number in range(6):
            play_episode(env, number, 5)
        env.start_episode("unfinished")
        env.get_action(at(9, 0))

    ev = serve(play, rollout_fragment_length=7, batch_mode="complete_episodes")
    batches = drained(ev)
    assert [batch.count for batch in batches] == [10, 10, 10]
    assert all(np.unique(batch["eps_id"], return_counts=True)[1].tolist() == [5, 5] for batch in batches)


def test_a_batch_cut_while_answers_are_out_continues_in_the_next(serve):
    """Lane 0 waits in the middle of its action when lane 1 fills the batch."""

    def play(env):
        slow = env.start_episode("slow")
        env.get_action(at(1, 0), slow)
        env.log_returns(7, episode_id=slow)
        env.get_action(at(1, 1), slow)
        play_episode(env, 2, 6)
        env.log_returns(8, episode_id=slow)
        env.end_episode(at(1, 2), slow)

    ev = serve(play, rollout_fragment_length=4)
    batches = drained(ev)
    by_number = {int(part[0][0][0]): part for part in rows_of(batches).values()}
    assert by_number == {1: expected(1, 2, reward=lambda k: 7 + k), 2: expected(2, 6)}
    assert batches[0].count == 4


@BOTH_MODES
def test_logged_rows_hold_what_was_logged(serve, batch_mode):
    def play(env):
        one, two = env.start_episode(), env.start_episode()
        for k in range(3):
            env.log_action(at(1, k), k, one, action_logp=-0.25 - k)
            env.log_returns(k, episode_id=one)
            assert env.get_action(at(2, k), two) == answer(2, k)
            env.log_returns(10 * k, episode_id=two)
        env.log_action(at(1, 3), 0, one)
        env.end_episode(at(1, 4), one, truncated=True)
        env.log_action(at(2, 3), 2, two, action_logp=-9)
        env.end_episode(at(2, 4), two)

    batches = drained(serve(play, batch_mode=batch_mode, rollout_fragment_length=3))
    got = {}
    for batch in batches:
        columns = (batch[c].tolist() for c in ("obs", "actions", "rewards", "action_logp", "values", "truncated"))
        for obs, *row in zip(*columns, strict=True):
            got[tuple(obs)] = row
    nan = got.pop((1, 3))
    assert nan[:2] == [0, 0]
    assert np.isnan(nan[2])
    assert nan[3:] == [3, True]
    assert got == {
        **{(1, k): [k, k, -0.25 - k, k, False] for k in range(3)},
        **{(2, k): [answer(2, k), 10 * k, -0.25, k, False] for k in range(3)},
        (2, 3): [2, 0, -9, 3, False],
    }


@BOTH_MODES
def test_episodes_that_are_not_for_training_are_answered_and_counted(serve, batch_mode):
    def play(env):
        for number in range(12):
            quiet = number % 3 == 1
            play_episode(env, number, 3, training_enabled=not quiet)
        kept, quiet = env.start_episode(), env.start_episode(training_enabled=False)
        for k in range(4):
            for number, episode in ((20, kept), (21, quiet)):
                assert env.get_action(at(number, k), episode) == answer(number, k)
                env.log_returns(1, episode_id=episode)
        env.end_episode(at(20, 4), kept)
        env.end_episode(at(21, 4), quiet)

    ev = serve(play, rollout_fragment_length=5, batch_mode=batch_mode)
    by_number = {int(part[0][0][0]): part for part in rows_of(drained(ev)).values()}
    kept = {n: expected(n, 3) for n in range(12) if n % 3 != 1}
    assert by_number == kept | {20: expected(20, 4, reward=lambda k: 1.0)}
    assert sorted(m.length for m in ev.get_metrics()) == [3] * 12 + [4] * 2
    assert sum(m.episode_return for m in ev.get_metrics() or []) == 0, "given out once"
    assert ev.env.num_unrecorded == 0
    assert not ev.env.unrecorded.any()


def test_episodes_that_are_not_for_training_leave_no_marks_behind(serve):
    marks = []

    def play(env):
        for number in range(300):
            play_episode(env, number, 1, training_enabled=False)
        marks.append(len(ev.sampler._buffer._starts))
        play_episode(env, 1, 1)

    ev = serve(play, rollout_fragment_length=2)
    (batch,) = drained(ev)
    assert batch.count == 1
    assert marks == [0]


@BOTH_MODES
def test_episodes_that_break_off_at_their_first_question_leave_no_marks_behind(serve, batch_mode):
    """Between two whole episodes in the same lane, so that a mark too many or too few would show in the rows."""
    marks = []

    def play(env):
        play_episode(env, 1, 2)
        for number in range(10, 30):
            episode = env.start_episode()
            env.get_action(at(number, 0), episode)
            env.desk.abandon(env.desk.registry.open[episode], "was given up")
        env.start_episode("last")
        marks.append(len(ev.sampler._buffer._starts))
        env.get_action(at(2, 0), "last")
        env.end_episode(at(2, 1), "last")

    ev = serve(play, batch_mode=batch_mode, rollout_fragment_length=40, max_concurrent=1)
    rows = rows_of(drained(ev))
    assert list(rows.values()) == [expected(1, 2), expected(2, 1, reward=lambda k: 0.0)]
    assert marks[0] <= 2  # the lane's, and that of the first episode


def test_callbacks_see_every_episode(serve):
    seen = []

    class Hears(Callbacks):
        def on_episode_step(self, episode):
            seen.append((episode.last_obs.tolist(), episode.last_action.item(), episode.last_reward, episode.last_info))

        def on_episode_end(self, episode):
            seen.append((episode.length, episode.episode_return))

    def play(env):
        for number, quiet in ((1, False), (2, True)):
            env.start_episode(training_enabled=not quiet)
            env.get_action(at(number, 0))
            env.log_returns(5, {"n": number})
            env.end_episode(at(number, 1))

    drained(serve(play, callbacks=Hears()))
    assert seen == [
        ([1, 1], answer(1, 0), 5, {"n": 1}),
        (1, 5),
        ([2, 1], answer(2, 0), 5, {"n": 2}),
        (1, 5),
    ]


# ---------------------------------------------------------------------- ends that were not planned


@BOTH_MODES
@pytest.mark.parametrize("fragment", [1, 10])
def test_an_episode_given_up_ends_truncated_where_it_last_asked(serve, batch_mode, fragment):
    """The last action's outcome never came: it is no row, and the row before it ends the episode."""

    class Impatient(RuledPolicy):
        def act(self, obs, explore=True):
            if [1, 3] in obs.tolist():
                slow.wait(LIMIT_S)
            return super().act(obs, explore)

    slow = threading.Event()

    def play(env):
        episode = env.start_episode()
        for k in range(3):
            env.get_action(at(1, k), episode)
            env.log_returns(10 + k, episode_id=episode)
        with pytest.raises(ServingError, match="no answer"):
            env.request_or_time_out(at(1, 3), episode)
        env.end_episode(at(1, 4), episode)
        slow.set()
        play_episode(env, 2, 1)

    class Env(Player):
        def request_or_time_out(self, obs, episode):
            # the sampling thread does the work here, so that the client may give up
            self.desk.inbox.lend_turns(None)
            self.get_action(obs, episode, timeout_s=0.05)

    ev = serve(Env(play), Impatient, batch_mode=batch_mode, rollout_fragment_length=fragment)
    batches = drained(ev)
    by_number = {int(part[0][0][0]): part for part in rows_of(batches).values()}
    assert by_number[2] == expected(2, 1)
    rows = expected(1, 3, reward=lambda k: 10 + k, truncated=True)
    if batch_mode == "truncate_episodes" and fragment == 1:  # the last row was handed out before, as a cut
        rows[-1] = (*rows[-1][:5], False, 2)
    assert by_number[1] == rows
    assert sorted((m.length, m.episode_return) for m in ev.get_metrics()) == [(1, 100.0), (3, 33.0)]
    assert ev.sampler.rows_lost == 1


def test_an_episode_given_up_at_its_first_question_leaves_nothing(serve):
    def play(env):
        env.start_episode()
        env.desk.inbox.lend_turns(None)
        blocked.wait(LIMIT_S)
        with pytest.raises(ServingError, match="no answer"):
            env.get_action(at(1, 0), timeout_s=0.01)
        env.end_episode(at(1, 1))
        released.set()
        play_episode(env, 2, 1)

    class Holds(RuledPolicy):
        def act(self, obs, explore=True):
            if [1, 0] in obs.tolist():
                released.wait(LIMIT_S)
            return super().act(obs, explore)

    blocked, released = threading.Event(), threading.Event()
    blocked.set()
    ev = serve(play, Holds)
    rows = rows_of(drained(ev))
    assert list(rows.values()) == [expected(2, 1)]
    assert [m.length for m in ev.get_metrics()] == [1]


@BOTH_MODES
def test_a_policy_that_fails_tells_both_sides_and_goes_on(serve, batch_mode):
    errors = []

    def play(env):
        env.start_episode("bad")
        env.get_action(at(1, 0))
        env.log_returns(4)
        try:
            env.get_action(at(1, 13))
        except ServingError as e:
            errors.append(str(e))
        try:
            env.end_episode(at(1, 1), "bad")
        except ServingError as e:
            errors.append(str(e))
        play_episode(env, 2, 2)

    ev = serve(play, Picky, batch_mode=batch_mode, rollout_fragment_length=2)
    with pytest.raises(ValueError, match="cannot bear 13"):
        drained(ev)
    by_number = {int(part[0][0][0]): part for part in rows_of(drained(ev)).values()}
    assert by_number[2] == expected(2, 2)
    assert by_number[1] == [((1, 0), (1, 13), answer(1, 0), 4.0, False, True, 0)]
    assert "'bad': cannot bear 13" in errors[0]
    assert "'bad' was closed, as no action could be had: cannot bear 13" in errors[1]


def test_a_policy_that_fails_in_the_sampling_thread_ends_serving_and_says_so(serve, workers):
    def play(env):
        env.start_episode()
        with pytest.raises(ServingError, match="cannot bear 13"):
            env.get_action(at(1, 13))
        told.set()
        with pytest.raises(ServingError, match="sampling has ended: ValueError: cannot bear 13"):
            [env.start_episode(timeout_s=LIMIT_S) for _ in range(9)]  # the fifth waits for a place
        done.set()

    told, done = threading.Event(), threading.Event()
    ev = serve(play, Picky, sample_async=True)
    with pytest.raises(SamplerError, match="cannot bear 13") as e:
        workers(1)[0].do(ev.sample)
    assert isinstance(e.value.__cause__, ValueError)
    assert told.wait(LIMIT_S)
    assert done.wait(LIMIT_S)


@pytest.mark.parametrize("sample_async", [False, True])
def test_close_ends_a_sample_that_waits(serve, workers, sample_async):
    ev = serve(Player(), sample_async=sample_async)
    (worker,) = workers(1)
    waiting = worker.begin(ev.sample)
    while not ev.env.env.is_alive():
        pass
    ev.close()
    with pytest.raises((EnvClosedError, SamplerError), match="closed"):
        outcome(waiting)


# ---------------------------------------------------------------------- settings


def test_a_horizon_needs_to_be_soft(serve):
    with pytest.raises(ConfigError, match="soft_horizon"):
        serve(Player(), horizon=3)

    def play(env):
        play_episode(env, 1, 7)

    ev = serve(play, horizon=3, soft_horizon=True)
    rows = list(rows_of(drained(ev)).values())
    assert [[row[0][1] for row in part] for part in rows] == [[0, 1, 2], [3, 4, 5], [6]]
    assert sorted(m.length for m in ev.get_metrics()) == [1, 3, 3]


def test_rewards_are_clipped_in_the_column_only(serve):
    def play(env):
        play_episode(env, 1, 3, reward=lambda k: (5, -3, 0.5)[k])

    ev = serve(play, clip_rewards=1.0)
    (batch,) = drained(ev)
    assert batch["rewards"].tolist() == [1, -1, 0.5]
    assert [m.episode_return for m in ev.get_metrics()] == [2.5]


def test_no_done_at_end(serve):
    def play(env):
        play_episode(env, 1, 2)

    (batch,) = drained(serve(play, no_done_at_end=True))
    assert not batch["terminated"].any()
    assert batch["next_obs"].tolist() == [[1, 1], [1, 2]]


def test_the_filter_sees_served_observations_once(serve):
    def play(env):
        for number in (1, 5):
            env.start_episode()
            for k in range(number):
                env.get_action(at(number, k))
            env.end_episode(at(number, number))

    ev = serve(play, ScriptedPolicy, observation_filter="MeanStdFilter")
    drained(ev)
    assert ev.filter.count == 8


# ---------------------------------------------------------------------- while training


class SlowLearner(PPOPolicy):
    """Its update lasts until it is released."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.learning, self.release = threading.Event(), threading.Event()

    def backward(self, batch):
        self.learning.set()
        assert self.release.wait(LIMIT_S)
        return super().backward(batch)


def test_actions_are_answered_while_the_learner_learns(serve, workers):
    """Then the new weights are used from the next batch on, and older batches nobody took are dropped and counted."""
    ask, asked = threading.Semaphore(0), []

    def play(env):
        env.start_episode()
        step = 0
        while ask.acquire(timeout=LIMIT_S) and not env.over:
            env.get_action(at(1, step))
            env.log_returns(1)
            asked.append(step)
            step += 1

    def more(count):
        goal = len(asked) + count
        for _ in range(count):
            ask.release()
        while len(asked) < goal:
            pass

    ev = serve(play, SlowLearner, rollout_fragment_length=4, sample_async=None)
    (learner,) = workers(1)
    ask.release(9)
    batch = ev.sample()
    assert batch["policy_version"].tolist() == [0] * 4
    update = learner.begin(lambda: ev.compute_apply(batch))
    assert ev.policy.learning.wait(LIMIT_S)
    more(40)
    assert ev.policy.version == 0
    assert not update["done"].is_set()
    ev.policy.release.set()
    outcome(update)
    assert ev.policy.version == 1
    more(9)
    while ev.sample()["policy_version"][0] == 0:
        more(4)
    assert ev.get_timers()["sampler/rows_dropped"] >= 32
    ask.release()
    ev.env.close()
    ask.release()


def test_waiting_for_a_slow_learner_where_so_set(serve):
    def play(env):
        for number in range(20):
            play_episode(env, number, 2)

    ev = serve(play, sample_async=True, sample_queue_full="wait", rollout_fragment_length=2)
    rows = rows_of(drained(ev))
    assert len(rows) == 20
    assert "sampler/rows_dropped" not in ev.get_timers()


def test_an_optimizer_trains_from_served_episodes(serve):
    def play(env):
        for number in range(200):
            env.start_episode()
            for k in range(3):
                env.get_action(at(number % 2, k))
                env.log_returns(1)
            env.end_episode(at(number % 2, 3))

    ev = serve(
        Player(play, spaces=(Box(-10, 10, (2,), np.float32), Discrete(3))),
        PPOPolicy,
        rollout_fragment_length=20,
        sample_async=None,
        sample_queue_size=100,
    )
    optimizer = SyncSamplesOptimizer(EvaluatorSet(ev))
    for _ in range(5):
        stats = optimizer.step()
        assert np.isfinite(stats["loss"])
    assert ev.policy.version == 5
    assert optimizer.num_steps_trained == optimizer.num_steps_sampled >= 100


def test_an_unknown_way_to_wait_is_an_error(serve):
    with pytest.raises(ConfigError, match="did you mean 'drop_oldest'"):
        serve(Player(), sample_queue_full="drop_oldst")


def test_a_lone_client_is_answered_in_its_own_thread(serve):
    threads = []

    class Notes(RuledPolicy):
        def act(self, obs, explore=True):
            threads.append(threading.current_thread())
            return super().act(obs, explore)

    def play(env):
        play_episode(env, 1, 50)

    ev = serve(play, Notes, rollout_fragment_length=100)
    rows = rows_of(drained(ev))
    assert list(rows.values()) == [expected(1, 50)]
    assert threads.count(ev.env.env) >= 45
    threads.clear()


def test_what_a_lone_client_meets_reaches_sample(serve):
    class Faulty(Callbacks):
        def on_episode_end(self, episode):
            raise KeyError("from a callback")

    def play(env):
        for number in range(3):
            play_episode(env, number, 5)

    ev = serve(play, callbacks=Faulty(), rollout_fragment_length=100)
    with pytest.raises(KeyError, match="from a callback"):
        ev.sample()


def test_sampling_is_told_the_end_only_once_it_is_reached(serve):
    ev = serve(lambda env: play_episode(env, 3, 3), rollout_fragment_length=2)
    assert [batch.count for batch in drained(ev)] == [2, 1]
    for _ in range(2):
        with pytest.raises(ServingEnded, match="run\\(\\) returned"):
            ev.sample()


def test_settings_reach_the_desk():
    settings = ServingSettings(timeout_s=3.0)
    assert Player(settings=settings).desk.settings is settings


def test_an_evaluator_that_never_samples_never_starts_its_clients(serve):
    """A local evaluator that only learns must not let its clients wait for answers nobody gives."""
    local, remote = serve(Player(lambda env: play_episode(env, 1, 9))), serve(lambda env: play_episode(env, 1, 9))
    SyncSamplesOptimizer(EvaluatorSet(local, [remote]))._collect()
    assert local.env.env.ident is None
    assert remote.env.env.ident is not None


def test_many_episodes_of_one_thread_cost_no_more_each():
    env = Player(max_concurrent=300)
    ids = [env.start_episode() for _ in range(300)]
    for episode in ids[1:]:
        env.end_episode(at(0, 0), episode)
    with pytest.raises(ServingError, match="no answer"):
        env.get_action(at(0, 0), timeout_s=0.01)  # the only one that is left
    assert [e.id for e in env.desk.asking.values()] == ids[:1]
