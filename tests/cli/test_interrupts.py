"""The first signal asks, the second one acts; handlers come back."""

import os
import signal

import pytest

from rlsample.cli.interrupts import on_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks(number):
    asked = []
    before = signal.getsignal(number)
    with on_interrupt(asked.append):
        os.kill(os.getpid(), number)
        assert asked == [number]
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_second_signal_acts():
    asked = []
    with on_interrupt(asked.append):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert asked == [signal.SIGINT]


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="inside"), on_interrupt(lambda number: None):
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is before
