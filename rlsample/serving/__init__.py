"""Served episodes over HTTP: a policy behind a port, and its clients. Needs the extra ``rlsample[serve]``."""

from typing import Any

from rlsample.serving.client_settings import ClientSettings
from rlsample.serving.http_settings import HttpSettings
from rlsample.serving.policy_client import PolicyClient
from rlsample.serving.policy_server import PolicyServer

__all__ = ["AsyncPolicyClient", "ClientSettings", "HttpSettings", "PolicyClient", "PolicyServer"]


def __getattr__(name: str) -> Any:
    if name == "AsyncPolicyClient":  # brings httpx, which only it needs
        from rlsample.serving.async_policy_client import AsyncPolicyClient

        return AsyncPolicyClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
