"""The nine rules of an optimizer, each as one function that raises ConformanceError.

from rlsample.testing import check_optimizer
check_optimizer(SyncSamplesOptimizer, make_my_evaluator)
check_optimizer(AsyncGradientsOptimizer, make_my_evaluator, make_engine=ProcessEngine, mortal=True)
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample.engine.engine import Engine
from rlsample.engine.thread_engine import ThreadEngine
from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_server import Fragment, SampleGradients
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.testing.base_env_player import ConformanceError
from rlsample.testing.held_resources import held_resources
from rlsample.testing.instrumented import ERROR_TEXT, Mishaps, instrumented, record_of

__all__ = ["OPTIMIZER_RULES", "check_optimizer"]

_STEP_S = 10.0  # an error must come out of step() within this
_CLOSE_S = 5.0
_VANISH_S = 2.0
_MOST_STEPS = 200


@dataclass
class _Given:
    make_optimizer: Callable[[EvaluatorSet], PolicyOptimizer]
    make_evaluator: Callable[[int], PolicyEvaluator]
    num_workers: int
    make_engine: Callable[[], Engine]
    background: bool
    mortal: bool


class _RecordingSet(EvaluatorSet):
    """Counts the rows that remote evaluators handed over."""

    rows_handed_over = 0

    def absorb(self, result: Any) -> tuple[Any, int | None]:
        if isinstance(result, Fragment):
            self.rows_handed_over += result.batch.count
        elif isinstance(result, SampleGradients):
            self.rows_handed_over += result.num_rows
        return super().absorb(result)


def check_optimizer(
    make_optimizer: Callable[[EvaluatorSet], PolicyOptimizer],
    make_evaluator: Callable[[int], PolicyEvaluator],
    rules: Iterable[int] | None = None,
    *,
    num_workers: int = 2,
    make_engine: Callable[[], Engine] = ThreadEngine,
    background: bool = False,
    mortal: bool = False,
) -> dict[int, str]:
    """Checks an optimizer, over evaluators of any kind, against the rules of
    :class:`~rlsample.optimizers.PolicyOptimizer`.

    Args:
        make_optimizer: ``make_optimizer(evaluators)``, a fresh one each time; closed here.
        make_evaluator: ``make_evaluator(worker_index)``; an instance must take new attributes. Small samples do.
        rules: which; None: all.
        num_workers, make_engine: remote evaluators, and where they live. The engines are closed here.
        background: the optimizer learns in threads of its own, so that what was learned is known a little later.
        mortal: the engine's workers are processes, and one may be killed.

    Returns:
        rule -> ``"ok"``, or what was left out and why.

    Raises:
        ConformanceError: the first rule that is broken.
    """
    given = _Given(make_optimizer, make_evaluator, num_workers, make_engine, background, mortal)
    chosen = sorted(OPTIMIZER_RULES) if rules is None else rules
    return {rule: OPTIMIZER_RULES[rule](given) or "ok" for rule in chosen}


class _Run:
    """An optimizer over instrumented evaluators."""

    def __init__(self, given: _Given, mishaps: Mishaps) -> None:
        make = functools.partial(instrumented, given.make_evaluator, mishaps)
        engine = given.make_engine() if given.num_workers else None
        made = _RecordingSet.create(make, given.num_workers, engine)
        assert isinstance(made, _RecordingSet)
        self.evaluators = made
        try:
            made.foreach_evaluator(record_of)  # all are there: starting them is no part of the first step
            self.optimizer = given.make_optimizer(self.evaluators)
        except BaseException:
            self.evaluators.close()
            raise

    @property
    def rows_handed_over(self) -> int:
        return self.evaluators.rows_handed_over + record_of(self.evaluators.local).rows_sampled

    def rows_learned(self) -> int:
        return sum(record.rows_learned for record in self.evaluators.foreach_evaluator(record_of))

    def check_counts(self, rule: int, given: _Given) -> str:
        """Exactly; ``background`` learning may be ahead of what was reported."""
        sampled, trained = self.optimizer.num_steps_sampled, self.optimizer.num_steps_trained
        _expect(rule, "num_steps_sampled, against the rows that evaluators handed over", sampled, self.rows_handed_over)
        learned = self.rows_learned()
        if not learned:
            return "the loss was not computed by the evaluators: num_steps_trained was not checked"
        if given.background:
            _at_most(rule, "num_steps_trained, against the rows that a loss was computed on", trained, learned)
        else:
            _expect(rule, "num_steps_trained, against the rows that a loss was computed on", trained, learned)
        return ""

    def check_counts_after_error(self, rule: int) -> None:
        """What is counted was done; work of others may lie ready for the next step."""
        optimizer, learned = self.optimizer, self.rows_learned()
        _at_most(rule, "num_steps_sampled, of rows handed over", optimizer.num_steps_sampled, self.rows_handed_over)
        if learned:
            _at_most(rule, "num_steps_trained, of rows learned", optimizer.num_steps_trained, learned)


@contextlib.contextmanager
def _running(given: _Given, mishaps: Mishaps | None = None) -> Iterator[_Run]:
    run = _Run(given, mishaps or Mishaps())
    try:
        yield run
    finally:
        run.optimizer.close()
        run.evaluators.close()


def _expect(rule: int, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise ConformanceError(rule, what, got, expected)


def _at_most(rule: int, what: str, got: int, most: int) -> None:
    if got > most:
        raise ConformanceError(rule, what, got, f"at most {most}")


def _within(rule: int, what: str, seconds: float, work: Callable[[], Any]) -> Any:
    """``work()`` in a thread, so that one that never ends is an error and no standstill."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as e:
            outcome.append((None, e))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise ConformanceError(rule, what, f"nothing after {seconds} s", "an end")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _step(rule: int, run: _Run) -> dict[str, float]:
    return _within(rule, "step()", _STEP_S, run.optimizer.step)


def _rule_1_counts(given: _Given) -> str:
    """Steps are counted from the data: rows that were handed over, rows that a loss was computed on."""
    with _running(given) as run:
        for _ in range(3):
            _step(1, run)
            note = run.check_counts(1, given)
        _expect(1, "whether anything was sampled in three steps", run.optimizer.num_steps_sampled > 0, True)
    return note


def _rule_2_statistics(given: _Given) -> str:
    """``step`` returns finite numbers; ``stats`` has the two counters."""
    with _running(given) as run:
        for _ in range(_MOST_STEPS):
            learned = _step(2, run)
            if learned:
                break
        else:
            raise ConformanceError(2, f"what {_MOST_STEPS} steps returned", {}, "statistics of the learner")
        for name, value in learned.items():
            finite = isinstance(value, (int, float)) and math.isfinite(value)
            _expect(2, f"whether {name}={value!r} is a finite number", finite, True)
        stats = run.optimizer.stats()
        for name in ("num_steps_sampled", "num_steps_trained"):
            _expect(2, f"stats()[{name!r}]", stats.get(name), getattr(run.optimizer, name))
    return ""


def _rule_3_weights(given: _Given) -> str:
    """What the local evaluator learns reaches the remote ones."""
    with _running(given) as run:
        if not run.evaluators.num_remote:
            return "no remote evaluators"
        before = [pickle.dumps(w) for w in run.evaluators.foreach_evaluator(_weights_of)]
        for _ in range(_MOST_STEPS):
            _step(3, run)
            after = [pickle.dumps(w) for w in run.evaluators.foreach_evaluator(_weights_of)]
            if run.optimizer.num_steps_trained and all(a != b for a, b in zip(after, before, strict=True)):
                return ""
        same = [i for i, (a, b) in enumerate(zip(after, before, strict=True)) if a == b]
        raise ConformanceError(3, f"evaluators whose weights are as before {_MOST_STEPS} steps", same, [])


def _weights_of(evaluator: PolicyEvaluator) -> Any:
    return evaluator.get_weights()


def _rule_4_sample_errors(given: _Given) -> str:
    """An evaluator's error in ``sample`` comes out of ``step``, as itself or as a cause; the counters are right."""
    return _check_error(4, given, Mishaps(sample_error_at=3))


def _rule_5_learn_errors(given: _Given) -> str:
    """An error in learning comes out of ``step``, as itself or as a cause; the counters are right."""
    return _check_error(5, given, Mishaps(learn_error_at=2))


def _check_error(rule: int, given: _Given, mishaps: Mishaps) -> str:
    with _running(given, mishaps) as run:
        for _ in range(_MOST_STEPS):
            try:
                _step(rule, run)
            except ConformanceError:
                raise
            except Exception as e:
                chain = _chain(e)
                found = any(isinstance(link, FloatingPointError) and ERROR_TEXT in str(link) for link in chain)
                _expect(rule, f"whether {chain} has FloatingPointError({ERROR_TEXT!r})", found, True)
                break
            if rule == 5 and run.optimizer.num_steps_trained and not run.rows_learned():
                return "the loss was not computed by the evaluators"
        else:
            if rule == 5 and not run.rows_learned():
                return "the loss was not computed by the evaluators"
            raise ConformanceError(rule, f"{_MOST_STEPS} steps after an evaluator raised", "no error", "the error")
        run.check_counts_after_error(rule)
        started = time.monotonic()
        _within(rule, "close() after an error", _CLOSE_S, run.optimizer.close)
        _expect(rule, "whether close() was over in time", time.monotonic() - started < _CLOSE_S, True)
    return ""


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and len(links) < 20:
        links.append(error)
        error = error.__cause__
    return links


def _rule_6_state(given: _Given) -> str:
    """``save`` gives plain data that another optimizer continues from: counters go on from where they were."""
    with _running(given) as run:
        for _ in range(3):
            _step(6, run)
        run.optimizer.close()
        state = run.optimizer.save()
        counters = run.optimizer.num_steps_sampled, run.optimizer.num_steps_trained
        _check_plain(state, "save()")
    with _running(given) as run:
        run.optimizer.restore(pickle.loads(pickle.dumps(state)))
        restored = run.optimizer.num_steps_sampled, run.optimizer.num_steps_trained
        _expect(6, "the counters after restore", restored, counters)
        _step(6, run)
        more = run.optimizer.num_steps_sampled - counters[0]
        _expect(6, "rows sampled after restore, against those handed over", more, run.rows_handed_over)
    return ""


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _expect(6, f"type of the key {name!r} in {where}", type(name), str)
            _check_plain(inner, f"{where}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{where}[{i}]")
    elif not isinstance(value, (bool, int, float, str, bytes, type(None), np.ndarray, np.generic)):
        raise ConformanceError(6, f"type of {where}", type(value), "a number, string, array, or dict or list of them")


def _rule_7_close(given: _Given) -> str:
    """``close`` is idempotent and bounded, leaves the evaluators open, and nothing else."""
    before = held_resources()
    run = _Run(given, Mishaps())
    try:
        for _ in range(3):
            _step(7, run)
        for _ in range(2):
            _within(7, "close()", _CLOSE_S, run.optimizer.close)
        rows = [e.count for e in run.evaluators.sample_round()]
        _expect(7, "whether the evaluators still sample", min(rows) > 0, True)
    finally:
        run.optimizer.close()
        run.evaluators.close()
    del run
    deadline = time.monotonic() + _VANISH_S
    left = held_resources() - before
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        left = held_resources() - before
    _expect(7, "what is left", sorted(left), [])
    return ""


def _rule_8_deaths(given: _Given) -> str:
    """An evaluator that is killed in the middle of a sample is replaced; training goes on, and counts stay right."""
    if not given.mortal:
        return "workers are no processes"
    with _running(given, Mishaps(death_at=3)) as run:
        for _ in range(_MOST_STEPS):
            _step(8, run)
            if run.evaluators.num_restarts:
                break
        else:
            raise ConformanceError(8, f"replacements in {_MOST_STEPS} steps", 0, 1)
        trained = run.optimizer.num_steps_trained
        for _ in range(3):
            _step(8, run)
        handed_over = run.rows_handed_over
        _expect(8, "num_steps_sampled, against the rows handed over", run.optimizer.num_steps_sampled, handed_over)
        _expect(8, "whether training went on", run.optimizer.num_steps_trained > trained, True)
        _expect(8, "replacements", run.evaluators.num_restarts, 1)
        _expect(8, "alive", run.evaluators.alive(), [True] * run.evaluators.num_remote)
    return ""


def _rule_9_no_remote(given: _Given) -> str:
    """Without remote evaluators an optimizer works, or says at once that it needs some."""
    local = _Given(given.make_optimizer, given.make_evaluator, 0, given.make_engine, given.background, False)
    try:
        with _running(local) as run:
            _step(9, run)
            run.check_counts(9, local)
    except ConfigError as e:
        _expect(9, f"whether the error names what is missing: {e}", "num_workers" in str(e), True)
        return "needs remote evaluators"
    return ""


OPTIMIZER_RULES: dict[int, Callable[[_Given], str]] = {
    1: _rule_1_counts,
    2: _rule_2_statistics,
    3: _rule_3_weights,
    4: _rule_4_sample_errors,
    5: _rule_5_learn_errors,
    6: _rule_6_state,
    7: _rule_7_close,
    8: _rule_8_deaths,
    9: _rule_9_no_remote,
}
