"""Served episodes over HTTP: a policy behind a port, and its clients. Needs the extra ``rlsample[serve]``."""

from rlsample.serving.client_settings import ClientSettings
from rlsample.serving.http_settings import HttpSettings
from rlsample.serving.policy_client import PolicyClient
from rlsample.serving.policy_server import PolicyServer

__all__ = ["ClientSettings", "HttpSettings", "PolicyClient", "PolicyServer"]
