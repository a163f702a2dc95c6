"""When a batch waits for clients that have still to be woken for their answers, by a script of what comes meanwhile."""

import collections
from types import SimpleNamespace

import pytest

from rlsample.env.serving.batch_gate import BatchGate

MAX_WAIT_S = 0.002


def gate_over(script, untold, ready=0):
    """A gate whose waits bring what the script says: (clients woken, entries that came, whether serving stopped)."""
    waits, script = [], iter(script)

    def wait(entries, timeout_s):
        woken, came, stopped = next(script)
        for _ in range(woken):
            desk.answered.popleft()
        inbox.ready.extend("x" * came)
        desk.registry.stopped = stopped
        waits.append((entries, timeout_s))

    def wake_all():
        desk.answered.clear()
        waits.append("wake_all")

    inbox = SimpleNamespace(ready=collections.deque("x" * ready), wait=wait)
    desk = SimpleNamespace(
        inbox=inbox,
        answered=collections.deque(range(untold)),
        registry=SimpleNamespace(stopped=False),
        wake_all=wake_all,
    )
    return BatchGate(desk, 100, MAX_WAIT_S), waits


ONE = (6, MAX_WAIT_S)


@pytest.mark.parametrize(
    ("script", "untold", "expected_waits", "late"),
    [
        ([(0, 6, False)], 0, [ONE], False),
        ([(0, 4, False)], 0, [ONE], True),
        ([(2, 3, False), (1, 1, False), (1, 2, False)], 4, [ONE] * 3, False),  # all before the last were too short
        ([(2, 2, False), (2, 2, False), (0, 2, False)], 4, [ONE] * 3, False),  # the last one woken has its time, too
        ([(2, 2, False), (2, 2, False), (0, 1, False)], 4, [ONE] * 3, True),
        ([(2, 2, False), (0, 1, False)], 4, [ONE, ONE, "wake_all"], True),  # whoever should wake the others does not
        ([(2, 2, True)], 4, [ONE, "wake_all"], True),
    ],
)
def test_the_time_counts_from_when_the_last_client_was_woken(script, untold, expected_waits, late):
    gate, waits = gate_over(script, untold)
    gate.wait(6)
    assert waits == expected_waits
    assert (gate._late, gate._vain) == ((True, 1) if late else (False, 0))
