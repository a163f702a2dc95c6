"""Slot states: who may be sent an action, reset or restarted, and what the error says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsample.env.slot_states import BUSY, ENDED, FAILED, NEW, RESETTING, WAITING, SlotStates
from rlsample.errors import EnvProtocolError

CODES = [NEW, WAITING, BUSY, ENDED, RESETTING, FAILED]


def states(*codes):
    s = SlotStates(len(codes))
    s.code[:] = codes
    return s


def test_slots_start_new_and_ids_are_fixed():
    s = SlotStates(3)
    assert s.code.tolist() == [NEW] * 3
    assert s.all_ids.tolist() == [0, 1, 2]
    with pytest.raises(ValueError):
        s.all_ids[0] = 1


def test_the_canonical_ids_come_back_as_they_are_when_all_wait():
    s = states(WAITING, WAITING)
    assert s.all_waiting()
    assert s.require_waiting(s.all_ids) is s.all_ids
    s.code[1] = BUSY
    assert not s.all_waiting()
    with pytest.raises(EnvProtocolError, match=r"^slot 1 takes no action: it is busy"):
        s.require_waiting(s.all_ids)
    assert s.require_waiting([0]).tolist() == [0]


@given(st.lists(st.sampled_from(CODES), min_size=1, max_size=14), st.data())
def test_each_request_is_granted_for_exactly_the_allowed_states(codes, data):
    s = states(*codes)
    ids = data.draw(st.lists(st.integers(0, len(codes) - 1), unique=True))
    for require, allowed in (
        (s.require_waiting, {WAITING}),
        (s.require_resettable, {WAITING, ENDED}),
        (s.require_failed, {FAILED}),
    ):
        offenders = [i for i in ids if codes[i] not in allowed]
        if not offenders:
            got = require(np.array(ids, np.int64))
            assert (got.tolist(), got.dtype) == (ids, np.int64)
        else:
            with pytest.raises(EnvProtocolError) as e:
                require(np.array(ids))
            assert [f"slot {i} " in str(e.value) for i in ids] == [i in offenders for i in ids]
        assert s.code.tolist() == codes


def test_many_ids_are_judged_like_few():
    s = states(*[WAITING] * 20)
    assert s.require_waiting(np.arange(20)[::-1]).tolist() == list(range(19, -1, -1))
    for last, message in ((0, "slot 0 is named twice"), (20, "slot 20 does not exist"), (-1, "slot -1 does not exist")):
        with pytest.raises(EnvProtocolError, match=f"^{message}"):
            s.require_waiting([*range(12), last])
    with pytest.raises(EnvProtocolError, match=r"^slot -1 does not exist"):
        s.require_waiting(np.arange(-1, 12))
    s.code[3] = ENDED
    assert len(s.require_resettable(np.arange(20))) == 20
    with pytest.raises(EnvProtocolError, match=r"^slot 3 takes no action: it is at its episode's end"):
        s.require_waiting(np.arange(20))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([2], r"slot 2 does not exist \(slots are 0 to 1\)"),
        ([-1], "slot -1 does not exist"),
        ([0, 0], "slot 0 is named twice"),
        ([0.0], r"got shape \(1,\) of float64"),
        ([[0]], r"got shape \(1, 1\)"),
        (0, r"got shape \(\)"),
        ([True], "of bool"),
    ],
)
def test_ids_must_exist_and_differ(ids, message):
    with pytest.raises(EnvProtocolError, match=message):
        states(WAITING, WAITING).require_waiting(ids)


def test_messages_say_what_each_slot_waits_for():
    s = states(NEW, WAITING, BUSY, ENDED, RESETTING, FAILED, WAITING)
    assert s.describe() == (
        "slot 0: not yet started (call poll first); slots 1, 6: waiting for an action; "
        "slot 2: busy with an action (poll returns its row); slot 3: at its episode's end (call try_reset); "
        "slot 4: resetting (poll returns its first observation); slot 5: failed (call try_restart)"
    )
    error = states(*[WAITING] * 11).nothing_pending()
    assert str(error) == (
        "poll has nothing to wait for: slots 0, 1, 2, 3, 4, 5, 6, 7 and 3 more: waiting for an action"
    )
