"""Small work stays in one thread; what others set and see is left alone."""

import re
import subprocess
import sys
import threading

import pytest
import torch

from rlsample.policy.one_thread import _limits, one_thread

needs_openmp = pytest.mark.skipif(_limits() is None, reason="this torch has no OpenMP of its own")


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def numbers():
    """What each library under torch would use in this thread."""
    return set(re.findall(r"get_(?:num|max)_threads\(\) : (\d+)", torch.__config__.parallel_info()))


@needs_openmp
def test_the_limit_is_the_calling_threads_alone(three_threads):
    seen = []

    def work():
        with one_thread():
            with one_thread():
                assert numbers() == {"1"}
            assert numbers() == {"1"}
            other = threading.Thread(target=lambda: seen.append(numbers()))
            other.start()  # it uses torch for the first time, and takes over what holds for the process
            other.join()
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        work()
    assert seen == [{"3"}]
    assert numbers() == {"3"}


SCRIPT = """
import time
import torch
from rlsample import CommonPolicyEvaluator
from rlsample.policy import DQNPolicy, PPOPolicy

def others_share(policy, length):
    options = dict(num_envs=8, rollout_fragment_length=length, vectorize="loop", seed=0)
    with CommonPolicyEvaluator("CartPole-v1", policy, **options) as evaluator:
        batch = evaluator.sample()
        all_before, mine_before = time.process_time(), time.thread_time()
        for _ in range(20):
            evaluator.compute_apply(batch)
            evaluator.apply_gradients(evaluator.compute_gradients(batch)[0])
        mine = time.thread_time() - mine_before
        return (time.process_time() - all_before - mine) / mine

torch.set_num_threads(3)
print(others_share(PPOPolicy, 32), others_share(DQNPolicy, 8), others_share(PPOPolicy, 512), torch.get_num_threads())
"""


@needs_openmp
def test_small_updates_cost_other_threads_nothing_and_large_ones_are_shared():
    """CPU time. 256 rows on a net of 9,000 parameters, 64 on one of 68,000; and 4,096 on the first."""
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert not out.returncode, out.stderr
    small, other_small, large, threads = map(float, out.stdout.split())
    assert max(small, other_small) < 0.1 < large
    assert threads == 3
