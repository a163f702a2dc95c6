"""Sampling in a thread of its own, ahead of the caller, behind a bounded queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlsample.errors import SamplerError
from rlsample.policy.policy import ActOutput, Policy
from rlsample.sample_batch import SampleBatch
from rlsample.tree import Tree, map_tree

__all__ = ["ActingView", "AsyncSampler"]

_CLOSE_WAIT_S = 5.0


class ActingView:
    """The part of a policy the sampler uses, one call at a time with whoever else holds ``lock``.

    Answers are copies: a policy may use its arrays again when it acts the next time, which here may be for another
    thread, while the sampler still writes down what they hold.
    """

    def __init__(self, policy: Policy, lock: threading.RLock) -> None:
        self._policy, self._lock = policy, lock

    @property
    def version(self) -> int:
        return self._policy.version

    @property
    def extra_columns(self) -> Mapping[str, Any]:
        return self._policy.extra_columns

    def act(self, obs: Tree, explore: bool = True) -> ActOutput:
        with self._lock:
            return _copied(self._policy.act(obs, explore))

    def act_for(self, agents: np.ndarray, obs: Tree, explore: bool = True) -> ActOutput:
        with self._lock:
            return _copied(self._policy.act_for(agents, obs, explore))


def _copied(out: ActOutput) -> ActOutput:
    actions = out.actions
    actions = actions.copy() if type(actions) is np.ndarray else map_tree(np.copy, actions)
    return ActOutput(actions, {name: values.copy() for name, values in out.extras.items()})


class AsyncSampler:
    """Calls ``sample`` in a daemon thread and keeps up to ``queue_size`` batches ready.

    The thread starts with the first :meth:`get`. What it raises is raised again by the next :meth:`get`, as the cause
    of a SamplerError, after the batches that were ready before; then sampling has ended for good.

    Args:
        drop_oldest: with a full queue, drop its oldest batch and go on sampling, instead of waiting.
        on_failure: called in the thread with what ended it, before anybody is told.

    Attributes:
        drops: as given.
    """

    def __init__(
        self,
        sample: Callable[[], SampleBatch],
        queue_size: int,
        drop_oldest: bool = False,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._sample = sample
        self.drops = drop_oldest
        self._on_failure = on_failure
        self._rows_dropped = self._rows_told = 0
        self._ready: queue.Queue[SampleBatch | None] = queue.Queue(maxsize=queue_size)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def get(self) -> SampleBatch:
        """The oldest batch that is ready; waits for one.

        Raises:
            SamplerError: the thread failed (the error is the cause), or the sampler is closed.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rlsample-sampler", daemon=True)
            self._thread.start()
        while not self._closed.is_set():
            try:
                batch = self._ready.get(
                    timeout=0.5
                )  # the end is queued too: the time limit only backs up a lost thread
            except queue.Empty:
                if self._thread.is_alive():
                    continue
                batch = None
            if batch is not None:
                return batch
            self._closed.set()
        raise SamplerError(f"the sampling thread ended: {self._error or 'closed'}") from self._error

    def take_rows_dropped(self) -> int:
        """Rows of the batches that nobody took in time, since the last call."""
        told, self._rows_told = self._rows_told, self._rows_dropped
        return self._rows_told - told

    def close(self) -> None:
        """Stops after the running ``sample``; waits at most 5 s for that. Idempotent."""
        self._closed.set()
        while True:  # make room for a put that waits
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_WAIT_S)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._put(self._sample())
        except BaseException as e:
            self._error = e
            if self._on_failure is not None:
                self._on_failure(e)
            self._put(None)

    def _put(self, batch: SampleBatch | None) -> None:
        patient = not self.drops or batch is None
        while not self._closed.is_set():
            try:
                self._ready.put(batch, timeout=0.2 if patient else 0.0)
            except queue.Full:
                if not patient:
                    self._drop()
            else:
                return

    def _drop(self) -> None:
        try:
            oldest = self._ready.get_nowait()
        except queue.Empty:  # taken just now
            return
        if oldest is not None:
            self._rows_dropped += oldest.count
