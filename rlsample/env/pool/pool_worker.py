"""A worker's life: build the envs, answer requests in shared memory until told to close.

    scan own slots for requests -> step them in chunks -> write rows, publish -> ring if the pool sleeps -> scan ...
    nothing to do: spin a little, then sleep until the doorbell rings

The pool's end of the pipe carries what is rare: the go-ahead, calls such as ``render``, and back infos and failures.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

import gymnasium
import numpy as np

from rlsample.env.pool.env_plan import EnvPlan
from rlsample.env.pool.memory_file import MemoryFile
from rlsample.env.pool.messages import Channel, pack_failure
from rlsample.env.pool.shared_block import (
    CLOSING,
    MAIL,
    NEED,
    PARKED,
    RESET,
    STEP,
    WAKES,
    ControlLines,
    SlotBlock,
)
from rlsample.env.pool.slot_runner import SlotRunner
from rlsample.env.pool.wakeups import STRONG_ORDER, Doorbell, fence, store_barrier
from rlsample.env.spaces import ActionCodec, nonfinite_rows
from rlsample.errors import EnvFailedError, RlsampleError

__all__ = ["LoopPlan", "Preparation", "worker_main"]

_PUBLISH_EVERY_S = 200e-6  # first come: how much work may be done before its rows are shown
_GLOBAL_SEED = 1 << 33  # spawn-key address, out of the way of slots and policies
_LOOK_UP_EVERY_S = 20e-3  # ordered: how much work may be done before a wish to close is noticed


@dataclass(frozen=True)
class LoopPlan:
    """How every worker of a pool works.

    Attributes:
        num_workers, ordered, reset_ahead, spin_us, threads: as in
            :class:`~rlsample.env.pool.pool_settings.PoolSettings`.
    """

    num_workers: int
    ordered: bool
    reset_ahead: bool
    spin_us: float
    threads: int


def worker_main(plan: dict[str, Any], fds: list[int]) -> NoReturn:
    """Lives and ends as a worker of a pool.

    Args:
        plan: ``worker``, ``slots`` (first, stop), ``config`` and ``spaces`` (places in the second memory file; spaces
            are None at first), ``cpus`` (or None), and, where a fork has them in its memory already, ``envs`` and
            ``loop``, the plans themselves.
        fds: the pipe, the shared memory, the memory file with the plans, this worker's doorbell (one or two), the
            pool's.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides what Ctrl-C means
    code = 1
    try:
        if plan["cpus"]:
            os.sched_setaffinity(0, plan["cpus"])
        _Worker(plan, fds).run()
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the pool is gone
    except SystemExit as e:  # out of an env: the pool reports the exit code
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                continue
        os._exit(code)  # no interpreter shutdown: it might wait for threads of an env


class Preparation:
    """What the nursery does before it forks a worker: loads what the plans need, once, for every fork to find."""

    def __init__(self) -> None:
        self._plans: dict[str, Any] | None = None

    def __call__(self, factory: bytes, plan: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """``envs`` and ``loop``; nothing where they cannot be loaded: a worker will find out for itself, and tell."""
        if self._plans is None:
            self._plans = {}
            _warm_up()
            envs, loop = _read_plans(fds[2], plan["config"])
            self._plans = {"envs": envs, "loop": loop}
        return self._plans


def _warm_up() -> None:
    """Has numpy load what it only loads when it is needed."""
    ActionCodec(gymnasium.spaces.Discrete(2)).to_env(np.zeros(1, np.int64))
    nonfinite_rows(np.zeros(1, np.float32))


def _read_plans(fd: int, place: tuple[int, int]) -> tuple[EnvPlan, LoopPlan]:
    """The plans that the pool wrote; loads the modules they need."""
    return pickle.loads(MemoryFile(fd).read(*place))


def _seed_global_generators(seed: int | None, worker_index: int, first_slot: int) -> None:
    """Makes the global generators of ``random`` and numpy differ between workers, which a fork would not."""
    entropy = np.random.SeedSequence(seed, spawn_key=(_GLOBAL_SEED, worker_index, first_slot))
    first, second = (int(word) for word in entropy.generate_state(2))
    random.seed(first)
    np.random.seed(second)


class _Worker:
    def __init__(self, plan: dict[str, Any], fds: list[int]) -> None:
        self.plan = plan
        self.channel = Channel(socket.socket(fileno=fds[0]))
        self.memory, self.papers = MemoryFile(fds[1]), MemoryFile(fds[2])
        bells = fds[3:]
        self.bell, self.pool_bell = (
            Doorbell(tuple(half)) for half in (bells[: len(bells) // 2], bells[len(bells) // 2 :])
        )
        self.loop: LoopPlan
        self.step_s = self.reset_s = 0.0  # what one slot's step and reset take

    def run(self) -> None:
        plan = self.plan
        try:
            if "envs" in plan:
                envs, self.loop = plan["envs"], plan["loop"]
            else:
                envs, self.loop = _read_plans(self.papers.fd, plan["config"])
        except Exception as e:
            self.refuse(_cannot_load(e, plan["slots"][0]))
        lines = ControlLines(self.memory, self.loop.num_workers)
        self.common, self.line = lines.common, lines.workers[plan["worker"]]
        _seed_global_generators(envs.seed, envs.worker_index, plan["slots"][0])
        self.runner = SlotRunner(envs, range(*plan["slots"]), self.line)
        try:
            if plan["spaces"] is None:
                self.build()
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(self.loop.threads)
            spaces = self.read(plan["spaces"])
            self.block = SlotBlock(self.memory.map(*plan["block"]), envs.num_envs, spaces, len(envs.info_keys))
            self.runner.attach(self.block, self.memory, spaces)
            gc.freeze()  # what is there stays: collections need not look at it, nor touch pages shared with the nursery
            self.serve()
        finally:
            self.runner.slots.close()

    def build(self) -> None:
        """Builds the envs, tells their spaces and waits for the go-ahead."""
        try:
            spaces = self.runner.slots.build_all()
        except Exception as e:
            self.refuse(e)
        self.channel.send(("spaces", pickle.dumps(spaces)))
        self.plan["spaces"], self.plan["block"] = self.channel.receive()

    def read(self, place: Any) -> Any:
        return pickle.loads(self.papers.read(*place))

    def refuse(self, error: Exception) -> NoReturn:
        """Tells why no env can be had, and ends."""
        failure = error
        if not isinstance(error, RlsampleError):
            failure = EnvFailedError(f"{type(error).__name__}: {error}", slot=self.plan["slots"][0])
            failure.__cause__ = error
        if isinstance(failure, EnvFailedError):
            self.channel.send(("failed", pack_failure(failure)))
        else:
            self.channel.send(("error", failure))
        raise SystemExit(0)

    # ------------------------------------------------------------------ the loop

    def serve(self) -> None:
        runner, common, line = self.runner, self.common, self.line
        request, done, command = runner.request, runner.done, self.block.command[runner.first :][: runner.count]
        all_steps = bytes(runner.count)
        mails = 0
        while not common[CLOSING]:
            seen = line[WAKES]
            while mails < line[MAIL]:
                mails += 1
                self.answer(self.channel.receive())
            todo = (request != done).nonzero()[0].tolist()
            if not todo:
                self.sleep(seen)
            elif command.tobytes() == all_steps:
                self.step(todo)
            else:
                asked = command.tolist()
                self.step([row for row in todo if asked[row] == STEP])
                for row in todo:
                    if asked[row] != STEP and not common[CLOSING]:
                        started = perf_counter()
                        (runner.reset if asked[row] == RESET else runner.restart)([row])
                        self.reset_s = _mean(self.reset_s, perf_counter() - started)
                        self.publish([row])

    def sleep(self, seen: int) -> None:
        """Until the pool has woken this worker more often than ``seen`` times."""
        line = self.line
        if self.loop.spin_us:
            until = perf_counter() + self.loop.spin_us * 1e-6
            while line[WAKES] == seen:
                if perf_counter() > until:
                    break
            else:
                return
        line[PARKED] = 1
        fence()
        if line[WAKES] == seen:
            self.bell.wait()
        line[PARKED] = 0

    def step(self, rows: list[int]) -> None:
        ordered = self.loop.ordered
        chunk_s = _LOOK_UP_EVERY_S if ordered else _PUBLISH_EVERY_S
        ended: list[int] = []
        at = 0
        while at < len(rows):
            if self.common[CLOSING]:
                return
            size = max(1, int(chunk_s / self.step_s)) if self.step_s else 1
            chunk = rows[at : at + size]
            at += size
            started = perf_counter()
            ended += self.runner.step(chunk)
            self.step_s = _mean(self.step_s, (perf_counter() - started) / len(chunk))
            if not ordered:
                self.publish(chunk)
                self.reset_ahead(ended)
                ended = []
        if ordered:  # quick resets are shown together with the ends: the pool will want them at once
            quick = len(ended) * self.reset_s < _PUBLISH_EVERY_S
            if quick:
                self.reset_ahead(ended)
            self.publish(rows)
            if not quick:
                self.reset_ahead(ended)

    def reset_ahead(self, rows: list[int]) -> None:
        """Resets ended rows, if that is wanted, and wakes a pool that waits for one of them."""
        if not self.loop.reset_ahead or not rows:
            return
        runner = self.runner
        for row in rows:
            if self.common[CLOSING]:
                return
            started = perf_counter()
            runner.reset_ahead(row)
            self.reset_s = _mean(self.reset_s, perf_counter() - started)
            self.flush()
            runner.ahead[row] = runner.request[row]
        fence()
        if self.common[NEED] and runner.wanted[rows].any():
            self.pool_bell.ring()

    def publish(self, rows: list[int]) -> None:
        """Shows the pool these rows, and wakes it if it sleeps for no more than there are now."""
        runner, block = self.runner, self.block
        runner.show_steps(rows)
        self.flush()
        if len(rows) == runner.count:
            runner.done[:] = runner.request
        else:
            runner.done[rows] = runner.request[rows]
        fence()
        need = self.common[NEED]
        # elsewhere than on x86 two workers might each miss the other's last row, so both ring
        if need and (need == 1 or not STRONG_ORDER or np.count_nonzero(block.done != block.taken) >= need):
            self.pool_bell.ring()

    def flush(self) -> None:
        """Sends infos and failures ahead of their rows."""
        if self.runner.outbox:
            self.channel.send(("notes", self.runner.outbox))
            self.runner.outbox.clear()
        store_barrier()

    # ------------------------------------------------------------------ rare calls

    def answer(self, message: tuple[Any, ...]) -> None:
        runner, (number, kind, *rest) = self.runner, message
        try:
            answer: Any = None
            if kind == "call":
                answer = runner.slots.call(*rest)
            elif kind == "set_attr":
                runner.slots.set_attr(*rest)
            else:
                runner.reset(*rest)
                runner.show_steps(rest[0])
                self.flush()
            self.channel.send(("answer", number, answer))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as e:
            failure = EnvFailedError(f"{kind} {rest[0]!r} raised {type(e).__name__}: {e}", slot=runner.first)
            failure.__cause__ = e
            self.channel.send(("refused", number, pack_failure(failure)))


def _mean(mean: float, new: float) -> float:
    """A running mean that follows the last few values; 0 stands for none yet."""
    return mean + 0.25 * (new - mean) if mean else new


def _cannot_load(error: Exception, slot: int) -> EnvFailedError:
    what = f"slot {slot}: the env factory cannot be loaded in a worker process ({type(error).__name__}: {error})"
    failure = EnvFailedError(
        f"{what}; the module that defines it must be importable there, or use start_method='fork'", slot=slot
    )
    failure.__cause__ = error
    return failure
