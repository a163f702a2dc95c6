import threading

import torch

from rlsample.policy.seeded_draws import seeded_draws


def test_the_global_generator_is_put_back_also_after_an_error():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    try:
        with seeded_draws(7):
            torch.rand(3)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.rand(4), expected)


def test_two_threads_do_not_take_each_others_numbers():
    with seeded_draws(3):
        expected = torch.rand(2)
    inside, other_began = threading.Event(), threading.Event()
    found, overlapped = [], []

    def second():
        inside.wait(10)
        other_began.set()
        with seeded_draws(4):
            overlapped.append(not first_left)
            torch.rand(1)

    first_left = []
    thread = threading.Thread(target=second)
    thread.start()
    with seeded_draws(3):
        found.append(torch.rand(1))
        inside.set()
        assert other_began.wait(10)
        thread.join(0.1)  # time to come in, if it were let
        found.append(torch.rand(1))
        first_left.append(True)
    thread.join(10)
    assert overlapped == [False]
    assert torch.equal(torch.cat(found), expected)
