"""Evaluators in processes, driven by hand: A3C in twenty lines, and one worker that is killed on the way.

python examples/process_workers.py            a few seconds
python examples/process_workers.py --quick    the same, with fewer updates
"""

import functools
import os
import signal
import sys

import torch

from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet, Requests
from rlsample.policy import A2CPolicy


def make_evaluator(seed, worker_index):
    """Index 0 is the local one, which learns; 1 and up live in processes of their own."""
    return CommonPolicyEvaluator(
        "CartPole-v1", A2CPolicy, num_envs=8, rollout_fragment_length=10, seed=seed, worker_index=worker_index
    )


def main(num_updates):
    torch.set_num_threads(1)
    with EvaluatorSet.create(functools.partial(make_evaluator, 0), num_workers=2) as evaluators:
        evaluators.sync_weights()
        requests = Requests(evaluators)
        for worker in range(evaluators.num_remote):
            requests.ask(worker, "sample_gradients")  # runs over there, starts at once
        updates = rows = 0
        while updates < num_updates:
            for answer in requests.take():  # whoever is ready
                evaluators.local.apply_gradients(answer.value.gradients)
                updates, rows = updates + 1, rows + answer.value.num_rows
                evaluators.publish_weights()  # one copy, in shared memory if it is large
                evaluators.send_weights(answer.worker)  # to this worker alone
                requests.ask(answer.worker, "sample_gradients")
                if updates == num_updates // 2:
                    os.kill(evaluators.remote[0].pid, signal.SIGKILL)
        returns = [episode.episode_return for episode in evaluators.get_metrics()]  # they came with the gradients
        print(f"{updates} updates on {rows} rows, {len(returns)} episodes")
        print(f"mean return: first 50 {sum(returns[:50]) / 50:.0f}, last 50 {sum(returns[-50:]) / 50:.0f}")
        print(f"workers replaced: {evaluators.num_restarts}, alive: {evaluators.alive()}")


if __name__ == "__main__":
    main(num_updates=100 if "--quick" in sys.argv else 500)
