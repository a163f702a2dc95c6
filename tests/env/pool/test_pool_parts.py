"""The pool's parts by themselves: messages, memory, doorbells, placement, rows."""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.env.pool import placement, wakeups
from rlsample.env.pool.memory_file import MemoryFile
from rlsample.env.pool.messages import Channel, framed, pack_failure, unpack_failure
from rlsample.env.pool.placement import numa_nodes, parse_cpu_list, worker_cpus
from rlsample.env.pool.pool_settings import PoolSettings, usable_cpus
from rlsample.env.pool.shared_block import ControlLines, SlotBlock
from rlsample.env.pool.wakeups import Doorbell, Waiter, fence, store_barrier
from rlsample.errors import ConfigError, EnvFailedError
from rlsample.tree import leaves


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    channels = Channel(a), Channel(b)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_whole_and_in_order(pair):
    a, b = pair
    sent = [1, "two", {"three": np.arange(3)}, b"x" * 300_000]
    thread = threading.Thread(target=lambda: [a.send(message) for message in sent])
    thread.start()
    got = [b.receive() for _ in sent]
    thread.join()
    assert got[:2] == [1, "two"]
    assert got[2]["three"].tolist() == [0, 1, 2]
    assert got[3] == sent[3]


def test_a_message_cut_short_is_an_end_and_one_that_lingers_can_be_waited_for(pair):
    a, b = pair
    b.sock.settimeout(0.05)
    assert b.look() == "nothing"
    message = framed("hello")
    a.sock.sendall(message[:3])
    with pytest.raises(TimeoutError):
        b.receive()
    a.sock.sendall(message[3:12])
    with pytest.raises(TimeoutError):
        b.receive()
    assert b.look() == "nothing"
    a.sock.sendall(message[12:])
    assert b.look() == "message"
    assert b.receive() == "hello"
    a.sock.sendall(message[:5])
    a.close()
    with pytest.raises(EOFError):
        b.receive()
    assert b.look() == "end"


def test_a_failure_crosses_with_its_cause():
    failure = EnvFailedError("slot 3: bad", slot=3, episode_step=7)
    try:
        raise KeyError("real-cause")
    except KeyError as e:
        failure.__cause__ = e
    back = unpack_failure(pack_failure(failure))
    assert (str(back), back.slot, back.episode_step) == ("slot 3: bad", 3, 7)
    assert isinstance(back.__cause__, KeyError)
    assert back.__cause__.args == ("real-cause",)
    assert "real-cause" in back.remote_traceback
    assert "test_a_failure_crosses_with_its_cause" in str(back.__cause__.__cause__)


def test_a_memory_file_hands_out_pages_and_papers():
    memory = MemoryFile()
    first = memory.extend(100)
    place = memory.append(b"paper" * 1000)
    second = memory.extend(10)
    assert first == 0
    assert place[0] % 4096 == second % 4096 == 0
    assert second > place[0] > 0
    assert memory.read(*place) == b"paper" * 1000
    a, b = memory.map(second, 10), memory.map(second, 10)
    a[3] = 9
    assert b[3] == 9
    a.close()
    b.close()
    memory.close()
    memory.close()


def test_control_lines_are_apart_by_a_cache_line():
    memory = MemoryFile()
    memory.extend(ControlLines.size(2))
    mine, theirs = ControlLines(memory, 2), ControlLines(memory, 2)
    mine.common[0], mine.workers[0][4], mine.workers[1][0] = 5, -7, 1 << 40
    assert (theirs.common[0], theirs.workers[0][4], theirs.workers[1][0]) == (5, -7, 1 << 40)
    assert ControlLines.size(2) == 3 * 64
    mine.close()
    theirs.close()
    memory.close()


SPACES = st.recursive(
    st.one_of(
        st.builds(
            lambda shape, dtype: gymnasium.spaces.Box(0, 1, tuple(shape), dtype),
            st.lists(st.integers(1, 3), max_size=3),
            st.sampled_from([np.uint8, np.float32, np.float64, np.int16]),
        ),
        st.builds(gymnasium.spaces.Discrete, st.integers(1, 9)),
        st.builds(gymnasium.spaces.MultiBinary, st.integers(1, 9)),
    ),
    lambda inner: st.one_of(
        st.builds(lambda parts: gymnasium.spaces.Tuple(parts), st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda parts: gymnasium.spaces.Dict({f"k{i}": p for i, p in enumerate(parts)}),
            st.lists(inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(SPACES, SPACES, st.integers(1, 5), st.integers(0, 2))
def test_columns_are_aligned_disjoint_and_within_the_block(obs_space, action_space, num_envs, num_keys):
    size = SlotBlock.size_of(num_envs, (obs_space, action_space), num_keys)
    memory = MemoryFile()
    memory.extend(size)
    buffer = memory.map(0, size)
    block = SlotBlock(buffer, num_envs, (obs_space, action_space), num_keys)
    names = ("request", "done", "taken", "ahead", "command", "incarnation", "steps")
    arrays = [getattr(block, name) for name in names] + leaves(block.actions)
    for plane in (block.step, block.first):
        arrays += [*leaves(plane.obs), plane.rewards, plane.flags, plane.infos, plane.has_info]
    base = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    spans = sorted((a.__array_interface__["data"][0] - base, a.nbytes) for a in arrays if a.nbytes)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= size
    assert all(a.shape[0] == num_envs for a in arrays)
    del block, arrays, buffer
    memory.close()


@pytest.mark.parametrize("eventfd", [True, False])
def test_doorbells_ring_once_for_many_rings(eventfd, monkeypatch):
    if not eventfd:
        monkeypatch.delattr(os, "eventfd", raising=False)
    bell = Doorbell()
    assert len(bell.fds) == (1 if eventfd else 2)
    for _ in range(70_000 if not eventfd else 3):
        bell.ring()
    bell.wait()
    if eventfd:
        assert not select.select([bell.fd], [], [], 0)[0]
    bell.ring()
    Doorbell(tuple(os.dup(fd) for fd in bell.fds)).close()
    bell.close()
    bell.close()


@pytest.mark.parametrize("epoll", [True, False])
def test_a_waiter_hears_the_bell_and_sockets(epoll, monkeypatch):
    if not epoll:
        monkeypatch.delattr(select, "epoll", raising=False)
    bell = Doorbell()
    waiter = Waiter(bell)
    mine, other = socket.socketpair()
    waiter.watch(mine, 7)
    assert waiter.wait(0.0) == []
    bell.ring()
    assert waiter.wait(10.0) == []
    assert waiter.wait(0.0) == []  # one ring wakes once
    other.send(b"x")
    assert waiter.wait(10.0) == [7]
    mine.recv(1)
    assert waiter.wait(0.01) == []
    other.close()
    assert waiter.wait(10.0) == [7]  # an end is heard too
    waiter.unwatch(mine)
    waiter.unwatch(mine)
    assert waiter.wait(0.01) == []
    mine.close()
    waiter.close()
    waiter.close()
    bell.close()


def test_fences_change_nothing_but_order(monkeypatch):
    fence()
    store_barrier()
    monkeypatch.setattr(wakeups, "STRONG_ORDER", False)
    store_barrier()
    assert not wakeups._lock.locked()


def test_cpu_lists():
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cpu_list("\n") == []


def test_workers_are_spread_over_nodes_and_pinned(tmp_path, monkeypatch):
    for node, cpus in ((0, "0-3"), (1, "4-7"), (2, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    assert numa_nodes(tmp_path) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: []}
    monkeypatch.setattr(placement, "usable_cpus", lambda: [1, 2, 3, 4, 5])

    def cpus(workers=3, **options):
        return worker_cpus(PoolSettings(**options), workers, tmp_path)

    assert cpus() == [None, None, None]
    assert cpus(workers=5) == [[1], [2], [3], [4], [5]]
    assert cpus(workers=5, thread_affinity_offset=-1) == [None] * 5
    assert cpus(thread_affinity_offset=1) == [[2], [3], [4]]
    assert cpus(workers=6, thread_affinity_offset=3)[:4] == [[4], [5], [1], [2]]
    assert cpus(numa="spread") == [[1, 2, 3], [4, 5], [1, 2, 3]]
    assert cpus(numa="1") == [[4, 5]] * 3
    assert cpus(numa="1", thread_affinity_offset=0) == [[4], [5], [4]]
    with pytest.raises(ConfigError, match=r"numa=2: no such node with a usable core; there are \[0, 1\]"):
        cpus(numa="2")


def test_default_layout(monkeypatch):
    cores = len(usable_cpus())
    assert PoolSettings().workers_for(10**6) == cores
    assert PoolSettings().workers_for(1) == 1
    assert PoolSettings(num_workers=9).workers_for(4) == 4
    assert PoolSettings(num_workers=cores).spin_for(99) == 0
    assert PoolSettings(spin_us=7.0).spin_for(99) == 7.0
    monkeypatch.setattr("rlsample.env.pool.pool_settings.usable_cpus", lambda: list(range(8)))
    assert PoolSettings(num_workers=7).spin_for(99) == 50.0
    assert PoolSettings(num_workers=8).spin_for(99) == 0


def test_ordered_unless_a_batch_is_smaller():
    assert PoolSettings().is_ordered(4)
    assert PoolSettings(batch_size=4).is_ordered(4)
    assert not PoolSettings(batch_size=3).is_ordered(4)
    assert not PoolSettings(ordered=False).is_ordered(4)
