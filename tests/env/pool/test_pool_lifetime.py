"""Starting and ending: nothing left behind, whoever dies; threads, signals, cores; what workers load."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from rlsample.env import AsyncVectorEnv, as_base_env
from rlsample.env.pool.placement import numa_nodes
from rlsample.env.pool.shared_block import NEED
from rlsample.errors import ConfigError, EnvClosedError, EnvError
from rlsample.testing import CountEnv
from rlsample.testing.faulty_env import Fault, faulty_factory

START_METHODS = ("fork", "forkserver", "spawn")


def run_script(body, **options):
    """A fresh interpreter with ``body``; its first line of output is awaited."""
    code = textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    return process, process.stdout.readline().strip()


def alive(pids):
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] != "Z":
                    found.append(pid)
        except FileNotFoundError:
            continue
    return found


def wait_for(done, limit_s):
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


POOL_SCRIPT = """
    import os, sys, threading, numpy as np
    from rlsample.env import as_base_env
    from rlsample.testing.faulty_env import Fault, faulty_factory
    def go():
        fault = {{0: Fault("hang", at=2)}} if {hang} else {{}}
        env = as_base_env(faulty_factory(fault, n=10**9, log="{log}"), 4, backend="process",
                          pool=dict(num_workers=2, start_method="{method}"))
        env.poll()
        print(*env.worker_pids, flush=True)
        while True:
            env.send_actions(env.all_ids, np.zeros(4, int)); env.poll()
    {run}
"""


@pytest.mark.parametrize("hang", [False, True])
@pytest.mark.parametrize("method", START_METHODS)
def test_workers_end_within_two_seconds_of_a_killed_parent(method, hang, tmp_path):
    log = tmp_path / "calls"
    body = POOL_SCRIPT.format(method=method, hang=hang, run="go()", log=log)
    process, line = run_script(body)
    pids = [int(word) for word in line.split()]
    assert len(alive(pids)) == 2
    assert wait_for(lambda: log.read_text().count("step 0") >= 2, 20.0)  # it plays, or hangs in slot 0
    process.kill()
    process.wait()
    ended = wait_for(lambda: not alive(pids), 2.0)
    process.stdout.close()
    process.stderr.close()
    assert ended, alive(pids)


def test_workers_live_on_when_the_thread_that_made_them_ends():
    body = """
        import threading, numpy as np
        from rlsample.env import as_base_env
        from rlsample.testing.faulty_env import faulty_factory
        made = []
        def make():
            made.append(as_base_env(faulty_factory(), 2, backend="process", pool=dict(num_workers=2)))
        thread = threading.Thread(target=make); thread.start(); thread.join()
        with made[0] as env:
            for _ in range(5):
                batch = env.poll(); env.send_actions(env.all_ids, np.zeros(2, int))
            print(batch.obs.ravel().tolist(), flush=True)
    """
    process, line = run_script(body)
    assert process.wait(10) == 0
    assert line == "[4.0, 4.0]"
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("method", START_METHODS)
def test_ctrl_c_makes_one_traceback_and_leaves_nothing(method, tmp_path):
    run = """
    try:
        go()
    except KeyboardInterrupt:
        print("interrupted", flush=True); raise
    """
    # the pool is closed by its destructor: the script has no with statement
    indented = textwrap.dedent(run).replace("\n", "\n    ")
    body = POOL_SCRIPT.format(method=method, hang=False, run=indented, log=tmp_path / "calls")
    process, line = run_script(body, start_new_session=True)
    pids = [int(word) for word in line.split()]
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to all of its processes
    out, err = process.communicate(timeout=10)
    assert out.split() == ["interrupted"]
    assert err.count("Traceback") == 1
    assert err.count("KeyboardInterrupt") == 1
    assert wait_for(lambda: not alive(pids), 2.0), alive(pids)


def test_close_is_idempotent_bounded_and_closes_each_env_once(make_pool, tmp_path):
    log = tmp_path / "calls"
    env = make_pool(5, env={"log": log}, num_workers=2)
    env.poll()
    env.close()
    env.close()
    calls = log.read_text().split()
    assert calls.count("make") == calls.count("close") == 5
    for call in (env.poll, lambda: env.send_actions(env.all_ids, np.zeros(5, int)), lambda: env.try_reset(env.all_ids)):
        with pytest.raises(EnvClosedError):
            call()


def test_close_kills_what_does_not_end(make_pool):
    env = make_pool(2, {0: Fault("hang", at=1)}, num_workers=2, close_timeout_s=0.3)
    env.poll()
    env.send_actions(env.all_ids, np.zeros(2, int))
    pids = env.worker_pids
    started = time.monotonic()
    env.close()
    assert time.monotonic() - started < 2
    assert not alive(pids)


@pytest.mark.parametrize("method", START_METHODS)
def test_close_from_another_thread_ends_a_poll_within_a_second(method, poll_in_thread):
    pool = {"num_workers": 2, "start_method": method, "close_timeout_s": 0.3}
    env = as_base_env(faulty_factory({0: Fault("hang", at=1)}), 2, backend="process", pool=pool)
    env.poll()
    env.send_actions(env.all_ids, np.zeros(2, int))
    poll = poll_in_thread(env)
    assert wait_for(lambda: env._team.common[NEED] > 0, 20.0)  # the poll sleeps
    closed = time.monotonic()
    closers = [threading.Thread(target=env.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    assert poll.ended(3)
    for closer in closers:
        closer.join(5)
        assert not closer.is_alive()
    assert poll.ended_at - closed < 1


def test_a_signal_handler_may_close_the_pool_that_is_polled(make_pool):
    env = make_pool(1, {0: Fault("hang", at=1)}, close_timeout_s=0.2)
    env.poll()
    env.send_actions(env.all_ids, np.zeros(1, int))
    before = signal.signal(signal.SIGALRM, lambda *_: env.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(EnvClosedError):
            env.poll()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_cannot_close_its_parents_pool(make_pool):
    env = make_pool(2, num_workers=2)
    env.poll()
    child = os.fork()
    if not child:
        env.close()
        os._exit(0)
    os.waitpid(child, 0)
    env.send_actions(env.all_ids, np.zeros(2, int))
    assert env.poll().obs.ravel().tolist() == [1, 1]


def test_a_pool_that_is_dropped_is_closed(tmp_path):
    env = as_base_env(faulty_factory(), 2, backend="process", pool={"start_method": "fork"})
    pids = env.worker_pids
    env.poll()
    del env
    assert wait_for(lambda: not alive(pids), 2.0)


def test_fork_is_refused_while_threads_run(make_pool):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="learner-3")
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"not safe while other threads run \(learner-3\).*forkserver"):
            make_pool(2)
    finally:
        stop.set()
        thread.join()
    make_pool(2).poll()


def test_fork_is_refused_once_cuda_is_in_use(make_pool, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA"):
        make_pool(2)


class Telling(CountEnv):
    """Tells about its process."""

    def tell(self):
        variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return {
            "torch": "torch" in sys.modules,
            "pygame": "pygame" in sys.modules,
            "variables": [os.environ.get(name) for name in variables],
            "cpus": sorted(os.sched_getaffinity(0)),
            "threads": len(os.listdir("/proc/self/task")),
            "pid": os.getpid(),
        }


def _telling(ctx):
    return Telling()


def test_workers_are_light_and_single_threaded(tmp_path):
    code = """
        import sys
        sys.path.insert(0, {folder!r})
        from rlsample.env import as_base_env
        import torch
        from telling import Telling
        told = []
        for method in ("forkserver", "spawn"):
            with as_base_env(Telling, 2, backend="process", pool=dict(num_workers=2, start_method=method)) as env:
                told += env.call("tell")
        print(repr(told), flush=True)
    """
    head = "import os, sys\nfrom rlsample.testing import CountEnv\n"
    (tmp_path / "telling.py").write_text(head + inspect.getsource(Telling))
    process, line = run_script(code.format(folder=str(tmp_path)))
    assert process.wait(20) == 0, process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    told = eval(line)
    assert len({worker["pid"] for worker in told}) == 4
    for worker in told:
        assert (worker["torch"], worker["pygame"]) == (False, False)
        assert worker["variables"] == ["1", "1", "1"]
        assert worker["threads"] == 1


def test_affinity_pins_workers_and_leaves_the_pool_alone(make_pool):
    before = os.sched_getaffinity(0)
    cpus = sorted(before)
    env = make_pool(3, make=_telling, num_workers=3, thread_affinity_offset=1)
    assert [told["cpus"] for told in env.call("tell")] == [[cpus[(1 + w) % len(cpus)]] for w in range(3)]
    assert os.sched_getaffinity(0) == before


def test_numa_pins_workers_to_the_cores_of_a_node(make_pool):
    usable, nodes = sorted(os.sched_getaffinity(0)), numa_nodes()
    env = make_pool(2, make=_telling, num_workers=2, numa="spread")
    told = [worker["cpus"] for worker in env.call("tell")]
    pools = [cpus for cpus in (sorted(set(usable) & set(node)) for node in nodes.values()) if cpus] or [usable]
    assert told == [pools[w % len(pools)] for w in range(2)]


def test_a_narrower_mask_is_respected(make_pool):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        env = make_pool(2, make=_telling, num_workers=None, thread_affinity_offset=0)
        assert env.num_workers == 1
        assert [told["cpus"] for told in env.call("tell")] == [[min(before)]] * 2
    finally:
        os.sched_setaffinity(0, before)


def test_calls_and_attributes_reach_every_env(make_pool):
    env = make_pool(3, num_workers=2)
    env.poll()
    assert env.call("n") == [5, 5, 5]
    env.set_attr("n", [1, 2, 3])
    assert env.call("n") == [1, 2, 3]
    env.send_actions(env.all_ids, np.zeros(3, int))
    assert env.poll().terminated.tolist() == [True, False, False]
    with pytest.raises(Exception, match="nothing_like_it"):
        env.call("nothing_like_it")
    assert env.call("k") == [0, 1, 1]  # slot 0 was reset ahead


def test_envs_are_built_at_the_same_time(make_pool):
    started = time.monotonic()
    env = make_pool(4, make=_slow_to_build)
    assert time.monotonic() - started < 1.5  # 4 x 0.5 s, one after the other, would be 2 s
    assert isinstance(env, AsyncVectorEnv)


def _slow_to_build(ctx):
    time.sleep(0.5)
    return CountEnv()


def test_a_module_that_starts_threads_is_not_forked(tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading\n"
        "from rlsample.testing import CountEnv\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "class Mine(CountEnv):\n"
        "    def threads(self): return threading.active_count()\n"
    )
    code = """
        import sys
        sys.path.insert(0, {folder!r})
        from rlsample.env import as_base_env
        from threaded import Mine
        with as_base_env(Mine, 2, backend="process", pool=dict(num_workers=2)) as env:
            print(env.call("threads"), flush=True)  # a fork would have lost the thread
    """
    process, line = run_script(code.format(folder=str(tmp_path)))
    out = process.communicate(timeout=20)
    assert (line, process.returncode) == ("[2, 2]", 0), out


class Dicing(CountEnv):
    def dice(self):
        import random

        return random.random(), float(np.random.random())


@pytest.mark.parametrize("method", START_METHODS)
def test_global_generators_differ_between_workers_and_not_between_runs(method):
    import cloudpickle

    before = np.random.get_state()[1].tolist()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # pytest imports test modules under names of its own
    try:
        runs = []
        for _ in range(2):
            pool = {"num_workers": 2, "start_method": method}
            with as_base_env(lambda ctx: Dicing(), 2, backend="process", pool=pool, seed=4) as env:
                runs.append(env.call("dice"))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert runs[0] == runs[1]
    assert len({number for pair in runs[0] for number in pair}) == 4
    assert np.random.get_state()[1].tolist() == before


def test_functions_of_the_main_module_can_be_sent():
    body = """
        import gymnasium, numpy as np
        from rlsample.env import as_base_env
        class Mine(gymnasium.Env):
            observation_space = gymnasium.spaces.Discrete(9); action_space = gymnasium.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None): return 7, {}
        offset = 1
        env = as_base_env(lambda ctx: Mine(), 2, backend="process", pool=dict(start_method="spawn"))
        print(env.poll().obs.tolist(), flush=True)
        env.close()
    """
    process, line = run_script(body)
    out = process.communicate(timeout=20)
    assert (line, process.returncode) == ("[7, 7]", 0), out


class LoadsForEver:
    """A factory that cannot be unpickled in time."""

    def __reduce__(self):
        return time.sleep, (600,)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_factory_that_takes_for_ever_to_load_is_an_error(monkeypatch, start_method):
    monkeypatch.setattr("rlsample.env.pool.worker_team._START_WAIT_S", 1.0)
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"step_timeout_s"):
        AsyncVectorEnv(LoadsForEver(), 2, pool={"start_method": start_method, "num_workers": 1, "step_timeout_s": 1.0})
    assert time.monotonic() - started < 30


def test_no_envs_are_an_error():
    with pytest.raises(ConfigError, match="num_envs must be at least 1, got 0"):
        AsyncVectorEnv(faulty_factory(), 0)


class ClosesItsFiles(CountEnv):
    """Closes all descriptors in its first step, as daemons do, and goes on for long."""

    def step(self, action):
        os.closerange(3, 1000)
        time.sleep(600)


def test_a_worker_that_closed_its_pipe_does_not_outlive_its_death(monkeypatch):
    monkeypatch.setattr("rlsample.env.pool.worker_team._EXIT_WAIT_S", 0.5)
    with AsyncVectorEnv(lambda ctx: ClosesItsFiles(9), 1, pool={"start_method": "fork"}) as env:
        env.poll()
        (pid,) = env.worker_pids
        env.send_actions(env.all_ids, np.zeros(1, np.int64))
        batch = env.poll(20)
        said = "slot 0, episode step 1: worker 0 closed its end of the pipe and was killed in this env"
        assert str(batch.failures[0]) == said
        assert not alive([pid])
