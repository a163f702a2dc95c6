"""The eleven rules of an engine, each as one function that raises ConformanceError.

from rlsample.testing import check_engine
check_engine(ThreadEngine)
check_engine(InlineEngine, concurrent=False)
check_engine(ProcessEngine, mortal=True)
"""

from __future__ import annotations

import functools
import gc
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlsample.engine.engine import Engine, Future, Handle
from rlsample.errors import WorkerDiedError
from rlsample.testing.base_env_player import ConformanceError
from rlsample.testing.engine_probe import Probe, fail_to_build
from rlsample.testing.held_resources import held_resources

__all__ = ["ENGINE_RULES", "check_engine"]

_PATIENCE_S = 20.0
_AT_ONCE_S = 2.0
_CLOSE_S = 5.0


@dataclass
class _Given:
    make_engine: Callable[[], Engine]
    folder: Path
    concurrent: bool
    mortal: bool

    def probe(self, engine: Engine) -> Handle:
        return engine.create(functools.partial(Probe, str(self.folder)))

    def file(self, name: str) -> str:
        path = self.folder / name
        path.unlink(missing_ok=True)
        return str(path)


def check_engine(
    make_engine: Callable[[], Engine],
    rules: Iterable[int] | None = None,
    *,
    concurrent: bool = True,
    mortal: bool = False,
) -> dict[int, str]:
    """Checks an engine against the rules of :class:`~rlsample.engine.Engine`.

    Args:
        make_engine: makes a fresh one each time; it is closed here.
        rules: which; None: all.
        concurrent: whether ``call`` returns before the call has ended.
        mortal: whether workers are processes of their own, which may be killed.

    Returns:
        rule -> ``"ok"``, or what was left out and why.

    Raises:
        ConformanceError: the first rule that is broken.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = _Given(make_engine, Path(folder), concurrent, mortal)
        return {rule: ENGINE_RULES[rule](given) or "ok" for rule in (sorted(ENGINE_RULES) if rules is None else rules)}


def _expect(rule: int, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise ConformanceError(rule, what, got, expected)


def _error_of(rule: int, what: str, future: Future) -> Exception:
    try:
        value = future.result(_PATIENCE_S)
    except TimeoutError as e:
        raise ConformanceError(rule, what, f"no answer within {_PATIENCE_S} s", "an error") from e
    except Exception as e:
        return e
    raise ConformanceError(rule, what, f"the result {value!r}", "an error")


def _await_file(path: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"{path} was never made")
        time.sleep(0.001)


def _rule_1_results(given: _Given) -> str:
    """A result is what the method returned, and its arrays belong to the caller."""
    value = {
        "a": np.arange(5),
        "b": (1, "x", None),
        "c": np.zeros((0, 3), np.uint8),
        "d": np.arange(12).reshape(3, 4)[:, ::2],
    }
    with given.make_engine() as engine:
        probe = given.probe(engine)
        got = probe.call("echo", value).result(_PATIENCE_S)
        same = {k: getattr(v, "tolist", lambda v=v: v)() for k, v in got.items()}
        _expect(1, "an echoed dict", same, {k: getattr(v, "tolist", lambda v=v: v)() for k, v in value.items()})
        _expect(1, "dtype and shape of an empty array", (got["c"].dtype, got["c"].shape), (np.dtype(np.uint8), (0, 3)))
        for size in (3, 100_000):
            first = probe.call("give_own", size).result(_PATIENCE_S)
            _expect(1, f"an array of {size} values can be written to", first.flags.writeable, True)
            first += 1
            second = probe.call("give_own", size).result(_PATIENCE_S)
            _expect(1, f"an array of {size} after the caller changed the first answer", second[:3].tolist(), [0, 1, 2])
            _expect(1, f"the first array of {size} after the second answer", first[:3].tolist(), [1, 2, 3])
    return ""


def _rule_2_order(given: _Given) -> str:
    """Calls of one handle run one after another, in order; handles have objects of their own."""
    with given.make_engine() as engine:
        one, other = given.probe(engine), given.probe(engine)
        futures = [handle.call("add", i) for i in range(20) for handle in (one, other)]
        got = [future.result(_PATIENCE_S) for future in futures]
        _expect(2, "what each of 20 calls saw", got, [list(range(i + 1)) for i in range(20) for _ in (one, other)])
        _expect(2, "index and incarnation", [one.index, one.incarnation, other.index], [0, 0, 1])
        _expect(
            2, "what the factories were given", [h.call("identify").result() for h in (one, other)], [(0, 0), (1, 0)]
        )
    return ""


def _rule_3_arguments(given: _Given) -> str:
    """Arguments are taken at once: changing an array after ``call`` changes nothing over there."""
    with given.make_engine() as engine:
        probe = given.probe(engine)
        for size in (3, 100_000):
            gate = given.file(f"gate-3-{size}")
            if given.concurrent:
                probe.call("block", gate)
            array = np.zeros(size)
            probe.call("keep", array)
            array[:] = 7
            Path(gate).touch()
            kept = probe.call("give_kept").result(_PATIENCE_S)
            _expect(3, f"an argument of {size} values, changed after the call", (len(kept), kept.max()), (size, 0.0))
    return ""


def _rule_4_errors(given: _Given) -> str:
    """A call's exception comes out of ``result`` with type, message, causes and the traceback; the object goes on."""
    with given.make_engine() as engine:
        probe = given.probe(engine)
        future = probe.call("fail", "x-7")
        for _ in range(2):
            error = _error_of(4, "a call that raises KeyError('x-7')", future)
            _expect(4, "its error", (type(error), error.args), (KeyError, ("x-7",)))
        text = "".join(traceback.format_exception(error))
        _expect(4, "whether the traceback shows where it was raised", "raise KeyError(message)" in text, True)
        error = _error_of(
            4, "a call that raises RuntimeError from FloatingPointError", probe.call("fail_chained", "nan-7")
        )
        _expect(4, "its cause", repr(error.__cause__), repr(FloatingPointError("nan-7")))
        error = _error_of(4, "a call whose exception does not pickle", probe.call("fail_unpicklably", "y-8"))
        _expect(4, f"whether {error!r} has the message", "y-8" in str(error), True)
        error = _error_of(4, "a method that is not there", probe.call("no_such_method"))
        _expect(4, f"whether {error!r} names it", "no_such_method" in str(error), True)
        _expect(4, "the next call", probe.call("echo", 5).result(_PATIENCE_S), 5)
        _expect(4, "alive", probe.alive(), True)
    return ""


def _rule_5_build_errors(given: _Given) -> str:
    """A factory's exception comes out of every result; other objects are well."""
    with given.make_engine() as engine:
        probe, broken = given.probe(engine), engine.create(fail_to_build)
        for _ in range(2):
            error = _error_of(5, "a call of an object that was not built", broken.call("echo", 1))
            _expect(5, "its error", (type(error), str(error)), (ValueError, "no-9 at 1"))
        _expect(5, "alive: the object that was not built, another", (broken.alive(), probe.alive()), (False, True))
        _expect(5, "a call of another object", probe.call("echo", 2).result(_PATIENCE_S), 2)
    return ""


def _rule_6_wait(given: _Given) -> str:
    """``wait`` returns once enough are done or the time is up: all that are done, in their order, and the rest."""
    with given.make_engine() as engine:
        _expect(6, "wait for nothing", engine.wait([], 1, 0.0), ([], []))
        a, b = given.probe(engine), given.probe(engine)
        if not given.concurrent:
            futures = [a.call("echo", 1), b.call("fail", "z")]
            _expect(6, "wait for calls that ended", engine.wait(futures, 1, 0.0), (futures, []))
            return "calls end at once"
        gates = [given.file("gate-6-a"), given.file("gate-6-b")]
        slow, quick = a.call("block", gates[0]), b.call("block", gates[1])
        _expect(6, "wait(timeout_s=0.05) while none is done", engine.wait([slow, quick], 1, 0.05), ([], [slow, quick]))
        _expect(6, "done", (slow.done(), quick.done()), (False, False))
        try:
            slow.result(0.05)
        except TimeoutError:
            pass
        else:
            raise ConformanceError(6, "result(0.05) of a call that goes on", "a result", "TimeoutError")
        Path(gates[1]).touch()
        _expect(6, "wait(num_ready=1)", engine.wait([slow, quick], 1, _PATIENCE_S), ([quick], [slow]))
        _expect(6, "wait(num_ready=2, timeout_s=0.05)", engine.wait([slow, quick], 2, 0.05), ([quick], [slow]))
        Path(gates[0]).touch()
        _expect(6, "wait(num_ready=9)", engine.wait([slow, quick], 9, _PATIENCE_S), ([quick, slow], []))
        _expect(6, "the call that a timeout was for", slow.result(0.0), gates[0])
    return ""


def _rule_7_futures(given: _Given) -> str:
    """A future knows its handle and tag, and tells its outcome as often as asked."""
    with given.make_engine() as engine:
        probe = given.probe(engine)
        future = probe.call("echo", "v", tag=("t", 1))
        _expect(7, "result, twice", (future.result(_PATIENCE_S), future.result(0.0)), ("v", "v"))
        _expect(7, "handle and tag", (future.handle is probe, future.tag), (True, ("t", 1)))
        _expect(7, "done", future.done(), True)
        _expect(7, "the tag where none was given", probe.call("echo", 1).tag, None)
    return ""


def _rule_8_replace(given: _Given) -> str:
    """A replacement is a fresh object with the same index; what was asked of the old one fails and never delivers."""
    with given.make_engine() as engine:
        old, other = given.probe(engine), given.probe(engine)
        old.call("add", 1).result(_PATIENCE_S)
        gate = given.file("gate-8")
        pending = old.call("block", gate) if given.concurrent else None
        new = engine.replace(old)
        Path(gate).touch()
        _expect(8, "index and incarnation", (new.index, new.incarnation), (0, 1))
        _expect(8, "what the factory was given", new.call("identify").result(_PATIENCE_S), (0, 1))
        _expect(8, "state of the new object", new.call("add", 2).result(_PATIENCE_S), [2])
        for future in [pending, old.call("echo", 1)]:
            if future is not None:
                error = _error_of(8, "a call of the old handle", future)
                _expect(
                    8, f"whether {error!r} is a WorkerDiedError that names worker 0", _names(error, "worker 0"), True
                )
        _expect(8, "alive: old, new, other", (old.alive(), new.alive(), other.alive()), (False, True, True))
        _expect(8, "a replacement of the replacement", engine.replace(new).incarnation, 2)
        _expect(8, "another object", other.call("add", 3).result(_PATIENCE_S), [3])
    return "" if given.concurrent else "without a call under way"


def _names(error: Exception, text: str) -> bool:
    return isinstance(error, WorkerDiedError) and text in str(error)


def _rule_9_posts(given: _Given) -> str:
    """A posted value is there before the next call begins: the newest, read-only; its error fails that call."""
    with given.make_engine() as engine:
        probes = [given.probe(engine), given.probe(engine)]
        for size in (3, 100_000):
            gate = given.file(f"gate-9-{size}")
            early = None
            if given.concurrent:
                probes[0].call("block", gate)
                early = probes[0].call("give_kept")
            array = np.full(size, 5.0)
            for values in (np.zeros(size), array):
                shared = engine.share({"a": values})
                for probe in probes:
                    probe.post("keep", shared)
            array[:] = 7
            del shared
            Path(gate).touch()
            if early is not None:
                seen = early.result(_PATIENCE_S)
                _expect(9, "the newest value, for a call that waited already", seen and seen["a"].max(), 5.0)
            kept = [probe.call("give_kept").result(_PATIENCE_S)["a"] for probe in probes]
            _expect(
                9, f"the newest of {size}, changed afterwards", [(len(k), k.max()) for k in kept], [(size, 5.0)] * 2
            )
            _expect(9, "writable", [p.call("kept_is_writable").result(_PATIENCE_S) for p in probes], [False] * 2)
        probes[0].post("refuse", engine.share(8))
        error = _error_of(9, "the call after a post that fails", probes[0].call("echo", 1))
        _expect(9, "its error", (type(error), str(error)), (ValueError, "refused 8"))
        _expect(9, "the call after that", probes[0].call("echo", 2).result(_PATIENCE_S), 2)
    return ""


def _rule_10_close(given: _Given) -> str:
    """``close`` is bounded and idempotent, closes each object once, releases who waits, and leaves nothing."""
    before = held_resources()
    for name in ("closed-0-0", "closed-1-0"):
        given.file(name)
    gate = given.file("gate-10")
    engine = given.make_engine()
    try:
        idle = _close_while_busy(given, engine, gate)
    finally:
        Path(gate).touch()
        engine.close()
    error = _error_of(10, "a call after close", idle.call("echo", 1))
    _expect(10, f"whether {error!r} is a WorkerDiedError", isinstance(error, WorkerDiedError), True)
    _expect(10, "alive after close", idle.alive(), False)
    closed = given.folder / "closed-0-0"
    _expect(10, "how often the idle object was closed", closed.read_text() if closed.exists() else "", "x")
    _nothing_left(10, before)
    return "" if given.concurrent else "without a call under way"


def _close_while_busy(given: _Given, engine: Engine, gate: str) -> Handle:
    """Closes an engine that has one idle and one busy object, and a thread that waits for the busy one."""
    idle, busy = given.probe(engine), given.probe(engine)
    idle.call("echo", 1).result(_PATIENCE_S)
    outcomes: list[Exception] = []
    waiter = None
    if given.concurrent:
        announced = given.file("announced-10")
        pending = busy.call("announce_and_block", announced, gate)
        waiter = threading.Thread(target=lambda: outcomes.append(_error_of(10, "a call whose engine closes", pending)))
        waiter.start()
        _await_file(announced)
    started = time.monotonic()
    engine.close()
    took = time.monotonic() - started
    _expect(10, f"whether close, which took {took:.1f} s, was over within {_CLOSE_S} s", took < _CLOSE_S, True)
    if waiter is not None:
        waiter.join(1.0)
        _expect(10, "whether a thread that waits for a call is released", waiter.is_alive(), False)
        _expect(10, f"whether it got a WorkerDiedError: {outcomes}", _names(outcomes[0], "worker 1"), True)
    return idle


def _nothing_left(rule: int, before: set[str]) -> None:
    deadline = time.monotonic() + _AT_ONCE_S
    left = held_resources() - before
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        left = held_resources() - before
    _expect(rule, "what is left after close", sorted(left), [])


def _rule_11_deaths(given: _Given) -> str:
    """A worker that dies fails its calls at once, by name; the others are well, and it can be replaced."""
    if not given.mortal:
        return "workers are no processes"
    before = held_resources()
    with given.make_engine() as engine:
        other, dying = given.probe(engine), given.probe(engine)
        for method, args, how in (("exit", (3,), "exit code 3"), ("kill", (), "SIGKILL")):
            dying.call("echo", 1).result(_PATIENCE_S)
            started = time.monotonic()
            futures = [dying.call(method, *args), dying.call("echo", np.zeros(100_000))]
            for future in futures:
                error = _error_of(11, f"a call of a worker that ended by {how}", future)
                named = _names(error, "worker 1") and how in str(error)
                _expect(11, f"whether {error!r} is a WorkerDiedError that names worker 1 and {how}", named, True)
            took = time.monotonic() - started
            _expect(11, f"whether that was known within {_AT_ONCE_S} s ({took:.1f})", took < _AT_ONCE_S, True)
            _expect(11, "alive: the dead one, the other", (dying.alive(), other.alive()), (False, True))
            error = _error_of(11, "a later call of the dead worker", dying.call("echo", 1))
            _expect(11, f"whether {error!r} is a WorkerDiedError", isinstance(error, WorkerDiedError), True)
            _expect(11, "the other worker", other.call("echo", 4).result(_PATIENCE_S), 4)
            dying = engine.replace(dying)
        _expect(11, "the replacement of the replacement", dying.call("identify").result(_PATIENCE_S), (1, 2))
    _nothing_left(11, before)
    return ""


ENGINE_RULES: dict[int, Callable[[_Given], str]] = {
    1: _rule_1_results,
    2: _rule_2_order,
    3: _rule_3_arguments,
    4: _rule_4_errors,
    5: _rule_5_build_errors,
    6: _rule_6_wait,
    7: _rule_7_futures,
    8: _rule_8_replace,
    9: _rule_9_posts,
    10: _rule_10_close,
    11: _rule_11_deaths,
}
