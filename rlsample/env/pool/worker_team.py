"""A pool's worker processes and what they share with it: started, woken, listened to, found dead or hung, replaced."""

from __future__ import annotations

import itertools
import pickle
import socket
import threading
import time
from typing import Any

import cloudpickle

from rlsample.env.columns import check_action_space, check_observation_space
from rlsample.env.pool.broken_off import BeginsAnew
from rlsample.env.pool.env_plan import EnvPlan, require_same_spaces
from rlsample.env.pool.launchers import make_launcher
from rlsample.env.pool.memory_file import MemoryFile
from rlsample.env.pool.messages import Channel, framed, unpack_failure
from rlsample.env.pool.pickled_values import ActionFile
from rlsample.env.pool.placement import worker_cpus
from rlsample.env.pool.pool_settings import PoolSettings
from rlsample.env.pool.pool_worker import LoopPlan
from rlsample.env.pool.shared_block import (
    CLOSING,
    MAIL,
    PARKED,
    PROGRESS,
    ROW,
    WAKES,
    ControlLines,
    SlotBlock,
)
from rlsample.env.pool.wakeups import STRONG_ORDER, Doorbell, Waiter, fence, store_barrier
from rlsample.env.pool.worker_death import Death, ending
from rlsample.errors import ConfigError, EnvClosedError, EnvFailedError

__all__ = ["WorkerTeam"]

_ANSWER_WAIT_S = 5.0  # for the rest of a message whose beginning is here
_EXIT_WAIT_S = 5.0  # between a process's end and its exit code
_START_WAIT_S = 60.0  # a process that has not begun a call yet may still be loading modules
_LOOK_AROUND_S = 0.25


class WorkerTeam:
    """W processes, each with a stretch of the slots. Not safe for several threads: the pool sees to that.

    Attributes:
        slots: per worker, its slots as a range.
        info_keys: as in the plan of the envs.
        block: the shared columns, once :meth:`start` is done.
        action_file: where actions without a fixed size go; from then on too.
        common: the common control line.
        pids: the process ids.
        waiter: waits for workers.
        notes: (slot, plane) -> (request, payload), what came by pipe and was not asked for yet.
    """

    def __init__(self, envs: EnvPlan, settings: PoolSettings) -> None:
        self.settings, self._envs, self.info_keys = settings, envs, envs.info_keys
        count = envs.num_envs
        workers = settings.workers_for(count)
        bounds = [count * w // workers for w in range(workers + 1)]
        self.slots = [range(a, b) for a, b in itertools.pairwise(bounds)]
        self._cpus = worker_cpus(settings, workers)
        self._loop = LoopPlan(
            workers,
            settings.is_ordered(count),
            settings.reset_ahead,
            settings.spin_for(count),
            settings.threads_per_worker,
        )
        limit = settings.step_timeout_s
        start_wait_s = None if limit is None else max(limit, _START_WAIT_S)
        self._launcher = make_launcher(settings.start_method, settings.threads_per_worker, start_wait_s)
        self._forks = settings.start_method == "fork"
        self._paper_places: dict[str, Any] = {"config": None, "spaces": None, "block": None}
        papers = b"" if self._forks else _pickled((envs, self._loop))
        self.notes: dict[tuple[int, int], tuple[int, Any]] = {}
        self._answers: dict[int, list[Any]] = {w: [] for w in range(workers)}
        self.pids: list[int] = [0] * workers
        self._channels: list[Channel | None] = [None] * workers
        self._progress = [(0, 0.0)] * workers
        self._memory, self._papers = MemoryFile(), MemoryFile()
        if papers:
            self._paper_places["config"] = self._papers.append(papers)
        self._memory.extend(ControlLines.size(workers))
        self._lines = ControlLines(self._memory, workers)
        self.common = self._lines.common
        self._bell, self._bells = Doorbell(), [Doorbell() for _ in range(workers)]
        self.waiter = Waiter(self._bell)
        self._open = True

    # ------------------------------------------------------------------ starting

    def start(self) -> tuple[Any, Any]:
        """Starts every worker, which build their envs; returns the spaces, and has :attr:`block` mapped.

        Raises:
            EnvFailedError: a constructor raised (of the lowest such slot), or a worker died or took too long.
            SpaceError: slots differ in their spaces, or these have no fixed size.
        """
        everyone = list(range(len(self.slots)))
        self._launch(everyone)
        answers = [self._first_answer(w) for w in everyone]
        for kind, payload in answers:
            if kind == "failed":
                raise unpack_failure(payload)
            if kind == "error":
                raise payload
        spaces = pickle.loads(answers[0][1])
        for w, (_, data) in enumerate(answers):
            if data != answers[0][1]:
                require_same_spaces(_Spaces(*pickle.loads(data)), self.slots[w].start, spaces, 0)
        check_observation_space(spaces[0], any_size=True)
        check_action_space(spaces[1], any_size=True)
        count, keys = self._envs.num_envs, len(self._envs.info_keys)
        size = SlotBlock.size_of(count, spaces, keys)
        place = (self._memory.extend(size), size)
        self.block = SlotBlock(self._memory.map(*place), count, spaces, keys)
        self.action_file = ActionFile(self._memory, self.block.action_places)
        self._paper_places.update(spaces=self._papers.append(answers[0][1]), block=place)
        for w in everyone:
            self._channel(w).send((self._paper_places["spaces"], place))
        return spaces

    def _launch(self, workers: list[int]) -> None:
        plans, fds, ends = [], [], []
        pool_bell = list(self._bell.fds)
        try:
            for w in workers:
                mine, its = socket.socketpair()
                ends.append(its)
                mine.settimeout(_ANSWER_WAIT_S)
                self._channels[w] = Channel(mine)
                self.waiter.watch(mine, w)
                slots = self.slots[w]
                plan = {"worker": w, "slots": (slots.start, slots.stop), "cpus": self._cpus[w], **self._paper_places}
                plans.append({**plan, "envs": self._envs, "loop": self._loop} if self._forks else plan)
                fds.append([its.fileno(), self._memory.fd, self._papers.fd, *self._bells[w].fds, *pool_bell])
            for w, pid in zip(workers, self._launcher.launch(plans, fds), strict=True):
                self.pids[w] = pid
                self._progress[w] = (0, time.monotonic())
        finally:
            for its in ends:
                its.close()

    def _first_answer(self, w: int) -> tuple[str, Any]:
        limit = self.settings.step_timeout_s
        channel, seen, since = self._channel(w), -1, time.monotonic()
        channel.sock.settimeout(0.2)
        while True:
            try:
                answer = channel.receive()
                channel.sock.settimeout(_ANSWER_WAIT_S)
                return answer
            except TimeoutError:
                progress, now = self._lines.workers[w][PROGRESS], time.monotonic()
                if progress != seen:
                    seen, since = progress, now
                elif limit is not None and now - since > (limit if progress else max(limit, _START_WAIT_S)):
                    self.kill(w)
                    death = self.bury(w, f"took more than step_timeout_s={limit:g} in __init__ and was killed")
                    raise death.failure(max(death.slot, self.slots[w].start), None) from None
            except EOFError:
                death = self.bury(w)
                raise death.failure(max(death.slot, self.slots[w].start), None) from None

    def relaunch(self, w: int) -> None:
        """Starts a new process for a dead worker; it builds an env for each slot that is asked to restart.

        Raises:
            EnvError, ConfigError, OSError: it cannot be started; it stays dead.
        """
        try:
            self._launch([w])
        except BaseException:
            self._hang_up(w)
            raise

    # ------------------------------------------------------------------ talking

    def wake(self, workers: Any) -> None:
        """Has these workers look at the requests that were written before."""
        lines, bells = self._lines.workers, self._bells
        store_barrier()
        for w in workers:
            lines[w][WAKES] += 1
        fence()
        for w in workers:
            if lines[w][PARKED] or not STRONG_ORDER:
                bells[w].ring()

    def ring_pool(self) -> None:
        """Ends a wait of :attr:`waiter`."""
        self._bell.ring()

    def listen(self, w: int) -> bool:
        """Takes one message of a worker, waiting for it; False if there is none and the worker is dead."""
        channel = self._channels[w]
        if channel is None:
            return False
        try:
            kind, *payload = channel.receive()
        except (EOFError, TimeoutError, OSError):
            return False
        if kind == "notes":
            for slot, plane, request, data in payload[0]:
                self.notes[slot, plane] = (request, data)
        elif kind in ("answer", "refused"):
            self._answers[w].append((kind, *payload))
        return True

    def note(self, w: int, slot: int, plane: int, request: int) -> Any:
        """What worker ``w`` sent about a row, or None if it died too early for that."""
        while True:
            found = self.notes.pop((slot, plane), None)
            if found is not None and found[0] == request:
                return found[1]
            if not self.listen(w):
                return None

    def ask(self, w: int, caller: BeginsAnew, *message: Any) -> Any:
        """Sends a message; returns the answer, or the Death that came first. Waits as long as the worker is not hung.

        What the worker sends meanwhile is taken: two full pipes would wait for each other.

        Raises:
            EnvFailedError: the env raised, or the worker was dead already.
            EnvClosedError: the caller is closing.
        """
        channel, line = self._channels[w], self._lines.workers[w]
        if channel is None:
            raise EnvFailedError(f"worker {w} is dead", slot=self.slots[w].start)
        line[MAIL] += 1
        number = line[MAIL]  # an answer to a call that was interrupted has another one
        rest = memoryview(framed((number, *message)))
        self.wake([w])
        while not caller.closing:
            try:
                if not rest and message[0] == "call":  # of a reset, nobody would know that it was made
                    caller.idle_in = threading.get_ident()
                rest = rest[channel.send_some(rest, _LOOK_AROUND_S) :]
            except OSError:
                rest = rest[:0]  # its end is gone
            caller.idle_in = None
            if w in self.hung(time.monotonic()):
                return self.bury_hung(w)
            if self.has_message(w):
                self.listen(w)
            elif self.is_dead(w):
                return self.bury(w)
            while self._answers[w]:
                kind, its_number, payload = self._answers[w].pop(0)
                if its_number == number:
                    if kind == "refused":
                        raise unpack_failure(payload)
                    return payload
        raise EnvClosedError("the env was closed during this call")

    def _channel(self, w: int) -> Channel:
        channel = self._channels[w]
        assert channel is not None
        return channel

    # ------------------------------------------------------------------ ends

    def is_up(self, w: int) -> bool:
        """Whether there is a process; it may have ended just now."""
        return self._channels[w] is not None

    def is_dead(self, w: int) -> bool:
        """Whether the worker's end of the pipe is closed, with nothing left to read. Never waits."""
        channel = self._channels[w]
        return channel is None or channel.look() == "end"

    def has_message(self, w: int) -> bool:
        """Whether there is something to :meth:`listen` to."""
        channel = self._channels[w]
        return channel is not None and channel.look() == "message"

    def hung(self, now: float) -> list[int]:
        """Workers with work to do that have begun no call for longer than the time limit."""
        limit, block = self.settings.step_timeout_s, self.block
        if limit is None:
            return []
        found = []
        for w, slots in enumerate(self.slots):
            line, mine = self._lines.workers[w], slice(slots.start, slots.stop)
            progress, since = self._progress[w]
            busy = line[ROW] >= 0 or bool((block.request[mine] != block.done[mine]).any())
            if not busy or line[PROGRESS] != progress:
                self._progress[w] = (line[PROGRESS], now)
            # one that has a message may be waiting for the pool to read it
            elif now - since > (limit if progress else max(limit, _START_WAIT_S)) and not self.has_message(w):
                found += [w] if self.is_up(w) else []
        return found

    def kill(self, w: int) -> None:
        """Kills a worker's process."""
        self._launcher.kill(self.pids[w])

    def bury_hung(self, w: int) -> Death:
        """Kills a worker that takes too long."""
        self.kill(w)
        return self.bury(w, f"took more than step_timeout_s={self.settings.step_timeout_s:g} and was killed")

    def bury(self, w: int, how: str = "") -> Death:
        """Takes what a dead worker still said, and says how it ended; its slots' requests are void."""
        while self.listen(w):
            pass
        self._hang_up(w)
        code = self._launcher.exit_code(self.pids[w], _EXIT_WAIT_S)
        if code is None and self._launcher.runs(self.pids[w]):
            self.kill(w)  # or it would go on with the rows it shares with its successor
            self._launcher.exit_code(self.pids[w], _EXIT_WAIT_S)
            how = how or "closed its end of the pipe and was killed"
        line = self._lines.workers[w]
        slot = line[ROW]
        line[PARKED] = line[MAIL] = line[PROGRESS] = 0
        line[ROW] = -1
        self._answers[w].clear()
        return Death(w, slot, how or ending(code))

    def _hang_up(self, w: int) -> None:
        channel, self._channels[w] = self._channels[w], None
        if channel is not None:
            self.waiter.unwatch(channel.sock)
            channel.close()

    def close(self, wait_s: float) -> None:
        """Has the workers close their envs and end, kills those that take longer, frees everything.

        Idempotent; called again after it broke off it does the rest.
        """
        if self._open:
            self._say_goodbye(time.monotonic() + wait_s)
            self._open = False
        self._launcher.close()
        self.waiter.close()
        for channel in self._channels:
            if channel is not None:
                channel.close()
        for bell in (self._bell, *self._bells):
            bell.close()
        self._lines.close()
        self._memory.close()
        self._papers.close()
        if hasattr(self, "block"):
            del self.block, self.action_file

    def _say_goodbye(self, deadline: float) -> None:
        self.common[CLOSING] = 1
        self.wake(range(len(self.slots)))
        for bell in self._bells:
            bell.ring()
        for channel in self._channels:
            if channel is not None:
                try:
                    channel.sock.shutdown(socket.SHUT_WR)  # a worker that waits for the go-ahead
                except OSError:
                    continue
        for w, channel in enumerate(self._channels):
            if channel is not None and _drained(channel.sock, deadline):
                self._launcher.exit_code(self.pids[w], max(0.0, deadline - time.monotonic()))


class _Spaces:
    """Looks like an env, for the comparison of spaces."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space


def _drained(sock: socket.socket, deadline: float) -> bool:
    """Reads and drops until the other side closes; False if the time is over before that."""
    while (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            if not sock.recv(65536):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def _pickled(plans: tuple[EnvPlan, LoopPlan]) -> bytes:
    try:
        return cloudpickle.dumps(plans)
    except Exception as e:
        raise ConfigError(
            f"the env factory or env_config cannot be sent to worker processes ({type(e).__name__}: {e}); give an id, "
            "a class or a function whose values can be pickled, or use start_method='fork'"
        ) from e
