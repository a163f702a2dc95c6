"""The server is killed with -9 and started again while clients play: what is lost, what goes on, none counted twice."""

import contextlib
import threading

import pytest

from rlsample.errors import EpisodeLostError, ServingError
from tests.env.serving.conftest import answer, at
from tests.serving.client_rig import RigProcess, client_of, free_port
from tests.serving.test_client import CLIENTS, row

STARTS_S = 120.0  # until a new process listens, on a busy machine


def test_episodes_of_a_killed_server_are_lost_and_new_ones_go_on():
    port = free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(RigProcess(port))
        clients = {
            kind: stack.enter_context(CLIENTS[kind](first.url, timeout_s=STARTS_S)) for kind in ("sync", "async")
        }
        waiting = stack.enter_context(client_of(first, timeout_s=STARTS_S))
        first.ready()
        for number, client in enumerate(clients.values(), 1):
            client.start_episode("played")
            client.get_action(at(number, 0))
            client.log_returns(5.0)
            client.end_episode(at(number, 1))
            client.start_episode(f"lost-{number}")
            client.get_action(at(number, 2))
            client.log_returns(7.0)
        first.kill()
        started = []
        thread = threading.Thread(target=lambda: started.append(waiting.start_episode()))
        thread.start()  # nobody listens: it tries until somebody does
        second = stack.enter_context(RigProcess(port))
        for number, client in enumerate(clients.values(), 1):
            with pytest.raises(EpisodeLostError, match=rf"'lost-{number}'.*start a new episode"):
                client.get_action(at(number, 3))
            assert client.open_episodes == []
            client.start_episode(f"lost-{number}")
            assert client.get_action(at(number, 4)) == answer(number, 4)
            client.log_returns(0.5)
            client.end_episode(at(number, 5))
        thread.join(STARTS_S)
        assert waiting.open_episodes == started
        assert waiting.get_action(at(3, 0)) == answer(3, 0)
        waiting.end_episode(at(3, 1))
        second.ready()
        assert second.episodes(3) == [
            [((1, 4), (1, 5), answer(1, 4), 0.5, True, False, 0)],
            [((2, 4), (2, 5), answer(2, 4), 0.5, True, False, 0)],
            [row(3, 0, answer(3, 0), 0.0, "term")],
        ]


def test_without_any_server_a_call_ends_in_time():
    with client_of(type("Nobody", (), {"url": f"http://127.0.0.1:{free_port()}"}), timeout_s=0.2) as client:
        with pytest.raises(ServingError, match=r"no answer of http://127.*in 0.2 s.*refused"):
            client.start_episode()
        assert client.open_episodes == []
