"""AnswerPacer: few answers out where clients only wait for each other, none held where they do not. In made-up time."""

from __future__ import annotations

import functools
import heapq
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlsample.serving import answer_pacer
from rlsample.serving.answer_pacer import AnswerPacer
from rlsample.serving.open_episode import Waiter
from tests.env.serving.conftest import answer, at
from tests.serving.client_rig import LIMIT_S, Rig, client_of


class Episode:
    pass


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class World:
    """Clients in a loop, a pacer, and a clock that jumps from event to event. It is the pacer's loop, too.

    Args:
        think: (now, how many others think) -> when a client that was answered now comes back.
    """

    def __init__(self, clients: int, think: Callable[[float, World], float]) -> None:
        self.now, self._events, self._count = 0.0, [], 0
        self.think = think
        self.pacer = AnswerPacer(self.give, lambda: None, lambda: self.now)
        self.pacer.loop = self  # type: ignore[assignment]
        self.thinking = self.answered = 0
        self.most_thinking = 0
        self.longest_hold_s = 0.0
        for _ in range(clients):
            waiter = Waiter([Episode()], None, 0.0)  # type: ignore[list-item]
            self.call_later(0.0, functools.partial(self.ask, waiter))

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        timer = Timer(call)
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, timer))
        return timer

    def call_soon(self, call: Callable[[], None]) -> Any:
        return self.call_later(0.0, call)

    def ask(self, waiter: Waiter) -> None:
        self.pacer.back(waiter.episodes[0])
        waiter.started = self.now
        self.pacer.take(waiter)
        self.pacer.hand_out()

    def give(self, waiter: Waiter) -> None:
        self.answered += 1
        self.longest_hold_s = max(self.longest_hold_s, self.now - waiter.started)
        self.thinking += 1
        self.most_thinking = max(self.most_thinking, self.thinking)
        self.call_later(self.think(self.now, self) - self.now, lambda: self.come_back(waiter))

    def come_back(self, waiter: Waiter) -> None:
        self.thinking -= 1
        self.ask(waiter)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events[0][0] < until:
            self.now, _, timer = heapq.heappop(self._events)
            if timer.call is not None:
                timer.call()
        self.now = until


def one_after_the_other(service_s: float, rng: random.Random) -> Callable[[float, World], float]:
    """Clients that share a lock: each needs it for a while, the longer, the more of them want it."""
    free_at = 0.0

    def think(now: float, world: World) -> float:
        nonlocal free_at
        crowd = 1.2 if world.thinking > 16 else 1.0
        free_at = max(free_at, now) + crowd * service_s * rng.uniform(0.5, 1.5)
        return free_at + 0.0001

    return think


def on_their_own(mean_s: float, rng: random.Random) -> Callable[[float, World], float]:
    return lambda now, world: now + mean_s * rng.uniform(0.5, 1.5)


@pytest.mark.parametrize("clients", [16, 64])
@pytest.mark.parametrize("seed", range(2))
def test_of_clients_that_share_a_lock_eight_are_answered_at_a_time(clients: int, seed: int) -> None:
    world = World(clients, one_after_the_other(0.0003, random.Random(seed)))
    world.run(1.0)
    world.most_thinking = world.answered = 0
    world.run(0.5)
    assert world.most_thinking == 8
    assert world.answered > 0.98 * 0.5 / 0.0003  # and the lock is never idle


@pytest.mark.parametrize("mean_s", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("seed", range(2))
def test_clients_on_their_own_are_all_answered_at_once(mean_s: float, seed: int) -> None:
    world = World(64, on_their_own(mean_s, random.Random(seed)))
    world.run(2.0)
    world.longest_hold_s = world.answered = 0
    world.run(1.0)
    assert world.answered > 0.8 * 64 / mean_s
    assert world.longest_hold_s < 0.1


def test_clients_that_ask_in_step_wait_in_a_trial_only() -> None:
    world = World(64, lambda now, world: 0.05 * (math.floor(now / 0.05 + 1e-6) + 1))
    held = []
    for _ in range(20):
        world.longest_hold_s = 0.0
        world.run(1.0)
        held.append(world.longest_hold_s > 0)
    assert held[0]
    assert not any(held[12:19])  # trials of a second or two each, after rests of 1, 2, 4 and 8 seconds


def test_up_to_eight_clients_are_never_held() -> None:
    world = World(8, one_after_the_other(0.0003, random.Random(0)))
    world.run(1.0)
    assert world.longest_hold_s == 0.0
    assert world.answered > 0.98 / 0.0003


def test_all_that_is_held_goes_when_the_server_ends() -> None:
    world = World(64, one_after_the_other(0.0003, random.Random(0)))
    world.run(1.0)
    held = len(world.pacer.held)
    assert held > 40
    before = world.answered
    world.pacer.flush()
    assert world.answered == before + held
    assert not world.pacer.held


@pytest.mark.parametrize("mode", [answer_pacer._TRYING, answer_pacer._PACING])
def test_paced_clients_get_their_own_answers_and_all_rows_are_kept(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, with two answers out at a time: eight clients, of which each waits for the others again and again."""
    monkeypatch.setattr(answer_pacer, "_AT_ONCE", 2)
    monkeypatch.setattr(answer_pacer, "_REFILL", 0)
    steps, held = 40, [0]
    with Rig() as rig, client_of(rig.server) as client:
        pacer = rig.server._calls.turns.pacer
        pacer._mode, pacer._until = mode, math.inf
        give = pacer._give_one

        def give_and_count(waiter: Waiter) -> None:
            held.append(len(pacer.held))
            give(waiter)

        pacer._give_one = give_and_count
        begun = threading.Barrier(8)

        def play(number: int) -> None:
            client.start_episode(f"e{number}")
            begun.wait(LIMIT_S)
            for step in range(steps):
                got.append(client.get_action(at(number, step), f"e{number}") == answer(number, step))
                client.log_returns(1.0, episode_id=f"e{number}")
            client.end_episode(at(number, steps), f"e{number}")

        got: list[bool] = []
        threads = [threading.Thread(target=play, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert got == [True] * 8 * steps
        batches = rig.finish(8 * steps)
    assert max(held) > 0
    seen = sorted(tuple(row) for batch in batches for row in batch["obs"].tolist())
    assert seen == sorted(tuple(at(number, step).tolist()) for number in range(8) for step in range(steps))
