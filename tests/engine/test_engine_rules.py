"""Every engine keeps the rules of the public suite, and an engine that breaks one is found out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rlsample.engine import InlineEngine, ProcessEngine, ProcessSettings, ThreadEngine
from rlsample.engine.inline_engine import InlineHandle
from rlsample.testing import ConformanceError
from rlsample.testing.engine_rules import ENGINE_RULES, check_engine


def test_inline():
    report = check_engine(InlineEngine, concurrent=False)
    left_out = {6: "calls end at once", 8: "without a call under way", 10: "without a call under way"}
    assert report == {**dict.fromkeys(ENGINE_RULES, "ok"), **left_out, 11: "workers are no processes"}


def test_thread():
    report = check_engine(lambda: ThreadEngine(close_timeout_s=0.5))
    assert report == {**dict.fromkeys(ENGINE_RULES, "ok"), 11: "workers are no processes"}


def test_process():
    quick = ProcessSettings(close_timeout_s=0.5)
    assert check_engine(lambda: ProcessEngine(quick), mortal=True) == dict.fromkeys(ENGINE_RULES, "ok")


def test_process_by_spawn():
    settings = ProcessSettings("spawn", close_timeout_s=0.5)
    assert check_engine(lambda: ProcessEngine(settings), [11], mortal=True) == {11: "ok"}


def test_process_by_fork():
    """In a process of its own: this one may have threads, which fork refuses."""
    code = """
import threading
from rlsample.engine import ProcessEngine, ProcessSettings
from rlsample.errors import ConfigError
from rlsample.testing.engine_rules import check_engine
print(check_engine(lambda: ProcessEngine(ProcessSettings("fork")), [1, 9, 11], mortal=True))
done = threading.Event()
thread = threading.Thread(target=done.wait, name="idler")
thread.start()
try:
    ProcessEngine(ProcessSettings("fork"))
except ConfigError as e:
    print("idler" in str(e))
done.set()
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.splitlines() == ["{1: 'ok', 9: 'ok', 11: 'ok'}", "True"], out.stderr


class Handle(InlineHandle):
    """An inline handle to break."""


class Engine(InlineEngine):
    """An inline engine with handles of another class."""

    handle_class: type[InlineHandle] = Handle

    def create(self, factory: Any) -> InlineHandle:
        handle = self.handle_class(len(self._handles), 0, factory, self._copies)
        self._handles.append(handle)
        return handle


class SharesArguments(Engine):
    class handle_class(Handle):
        def call(self, name: str, *args: Any, tag: Any = None) -> Any:
            self._copies = name != "keep"
            return super().call(name, *args, tag=tag)


class OneObject(Engine):
    def create(self, factory: Any) -> InlineHandle:
        handle = super().create(factory)
        handle.object = self._handles[0].object
        return handle


class WrapsErrors(Engine):
    class handle_class(Handle):
        def call(self, name: str, *args: Any, tag: Any = None) -> Any:
            future = super().call(name, *args, tag=tag)
            if future._error is not None:
                future._error = RuntimeError(str(future._error))
            return future


class RaisesWhenBuilding(Engine):
    def create(self, factory: Any) -> InlineHandle:
        handle = super().create(factory)
        if handle._build_error is not None:
            raise handle._build_error
        return handle


class ForgetsTheRest(Engine):
    def wait(self, futures: Any, num_ready: int = 1, timeout_s: float | None = None) -> Any:
        done, pending = super().wait(futures, num_ready, timeout_s)
        return done[:num_ready], pending


class LosesTags(Engine):
    class handle_class(Handle):
        def call(self, name: str, *args: Any, tag: Any = None) -> Any:
            return super().call(name, *args)


class SameIncarnation(Engine):
    def replace(self, handle: Any) -> Any:
        new = super().replace(handle)
        new.incarnation = handle.incarnation
        return new


class OldOneAnswers(Engine):
    def replace(self, handle: Any) -> Any:
        new = super().replace(handle)
        handle.refuses = None
        return new


class KeepsTheFirstPost(Engine):
    class handle_class(Handle):
        posted = 0

        def post(self, name: str, shared: Any) -> None:
            self.posted += 1
            if self.posted == 1:
                super().post(name, shared)


class PostsTheValueItself(Engine):
    def share(self, value: Any) -> Any:
        class Live:
            def load(self) -> Any:
                return value

        return Live()


class ClosesNothing(Engine):
    def close(self) -> None:
        for handle in self._handles:
            handle.refuses = "was closed"


class AnswersAfterClose(Engine):
    def close(self) -> None:
        if not self._closed:
            super().close()
            self._closed = True
            for handle in self._handles:
                handle.refuses = None


class LeavesAThread(ThreadEngine):
    def __init__(self) -> None:
        super().__init__(close_timeout_s=0.1)

    def close(self) -> None:
        super().close()
        self._closed = False
        self.create(lambda index, incarnation: None)
        self._closed = True


class ClosesSlowly(ThreadEngine):
    def __init__(self) -> None:
        super().__init__(close_timeout_s=1.1)


class TellsNoExitCode(ProcessEngine):
    def _ended(self, key: int, code: int | None) -> None:
        super()._ended(key, None)


BROKEN = {
    "results alias": (lambda: InlineEngine(copies=False), 1, "array of 3"),
    "handles share an object": (OneObject, 2, "what each"),
    "arguments alias": (SharesArguments, 3, "argument of 3"),
    "errors lose their type": (WrapsErrors, 4, "its error"),
    "wait gives out no more than was asked for": (ForgetsTheRest, 6, "calls that ended"),
    "tags are lost": (LosesTags, 7, "tag"),
    "the incarnation does not count": (SameIncarnation, 8, "incarnation"),
    "a replaced object answers": (OldOneAnswers, 8, "old handle"),
    "an older post wins": (KeepsTheFirstPost, 9, "newest of 3"),
    "posts are no copies": (PostsTheValueItself, 9, "newest of 3"),
    "objects are not closed": (ClosesNothing, 10, "idle object was closed"),
    "calls work after close": (AnswersAfterClose, 10, "after close"),
}


@pytest.mark.parametrize(("make", "rule", "what"), BROKEN.values(), ids=BROKEN)
def test_a_broken_engine_is_found_out(make: Any, rule: int, what: str):
    with pytest.raises(ConformanceError, match=what) as caught:
        check_engine(make, [rule], concurrent=False)
    assert caught.value.rule == rule


def test_an_engine_that_raises_from_create_is_found_out():
    with pytest.raises(ValueError, match="no-9"):
        check_engine(RaisesWhenBuilding, [5], concurrent=False)


@pytest.mark.parametrize(("make", "what"), [(ClosesSlowly, "over within"), (LeavesAThread, "left after close")])
def test_a_broken_close_is_found_out(make: Any, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlsample.testing.engine_rules._AT_ONCE_S", 0.2)
    monkeypatch.setattr("rlsample.testing.engine_rules._CLOSE_S", 1.0)
    made: list[Any] = []

    def remember() -> Any:
        made.append(make())
        return made[-1]

    with pytest.raises(ConformanceError, match=what):
        check_engine(remember, [10])
    for handle in made[0]._handles:
        handle.refuse("was closed")
        handle.end(0.0)


def test_a_death_without_exit_code_is_found_out():
    with pytest.raises(ConformanceError, match="exit code 3"):
        check_engine(TellsNoExitCode, [11], mortal=True)
