"""A server that answers byte by byte does not hold a client past its time."""

import asyncio
import contextlib
import socket
import threading

import pytest

from rlsample.errors import ServingError
from rlsample.serving.async_policy_client import AsyncPolicyClient
from rlsample.serving.client_settings import ClientSettings
from rlsample.serving.policy_client import PolicyClient
from tests.serving.client_rig import LIMIT_S

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
BEGUN = {"head": HEAD + b"x-more: ", "body": HEAD + b"content-length: 1000000\r\n\r\n"}
SOON = ClientSettings(timeout_s=0.3)


@contextlib.contextmanager
def dribbling_server(begun):
    """Its address. It answers every request with a beginning and then a byte every 20 ms, without an end."""
    over = threading.Event()

    def dribble(connection):
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(begun)
            while not over.wait(0.02):
                connection.sendall(b" ")

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=dribble, args=(listening.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(LIMIT_S)


def outcome(call):
    """What a call raised, in a thread that is not waited for any longer than it takes to say that it hangs."""
    raised = []

    def run():
        try:
            call()
        except ServingError as e:
            raised.append(str(e))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the call hangs"
    return raised


@pytest.mark.parametrize("begun", sorted(BEGUN))
def test_a_call_ends_in_time_though_bytes_come(begun):
    with dribbling_server(BEGUN[begun]) as address, PolicyClient(address, settings=SOON) as client:
        (message,) = outcome(lambda: client.start_episode("e"))
        assert "no answer of http://127.0.0.1" in message
        assert "in 0.3 s" in message
        assert "TimeoutError" in message


@pytest.mark.parametrize("begun", sorted(BEGUN))
def test_an_awaited_call_ends_in_time_though_bytes_come(begun):
    async def start(address):
        async with AsyncPolicyClient(address, settings=SOON) as client:
            await client.start_episode("e")

    with dribbling_server(BEGUN[begun]) as address:
        (message,) = outcome(lambda: asyncio.run(start(address)))
        assert "in 0.3 s" in message
        assert "TimeoutError" in message
