"""Where evaluators run: in this thread, in threads, in processes."""

from rlsample.engine.engine import Engine, Future, Handle
from rlsample.engine.inline_engine import InlineEngine
from rlsample.engine.process_engine import ProcessEngine, ProcessSettings
from rlsample.engine.shared_value import SharedValue
from rlsample.engine.thread_engine import ThreadEngine

__all__ = [
    "Engine",
    "Future",
    "Handle",
    "InlineEngine",
    "ProcessEngine",
    "ProcessSettings",
    "SharedValue",
    "ThreadEngine",
]
