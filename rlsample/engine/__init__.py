"""Engines: where evaluators run. Optimizers are written against :class:`Engine` alone."""

from rlsample.engine.engine import Engine, Future, Handle

__all__ = ["Engine", "Future", "Handle"]
