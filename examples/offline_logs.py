"""Record experience, learn from it without the env, judge a policy by it, and play it again.

    python examples/offline_logs.py [--quick]

1. PPO trains a little on CartPole and writes what it samples to logs/.
2. DQN learns from those logs alone: the env is never stepped.
3. Importance sampling estimates what DQN would earn from what PPO did; then it plays, and we see.
4. The same logs go through a ServingEnv, row by row, as if they were being served.
"""

import sys
import tempfile
from pathlib import Path

import gymnasium

import rlsample
from rlsample.algorithms import evaluate
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.offline import EpisodeAssembler, LogReader, LogReplayEnv, estimate_return
from rlsample.policy import RandomPolicy


def main(folder: Path, quick: bool) -> None:
    logs, run = folder / "logs", folder / "dqn"
    rlsample.train(algo="ppo", env="CartPole-v1", max_steps=4_000 if quick else 40_000, output=str(logs))
    sizes = [path.stat().st_size for path in logs.iterdir()]
    with LogReader(logs) as reader:
        rows = sum(batch.count for batch in reader)
    print(f"1. {rows:,} rows of PPO in {len(sizes)} file(s), {sum(sizes) / rows:.0f} bytes a row")

    rlsample.train(
        algo="dqn",
        env="CartPole-v1",
        input=str(logs),
        input_shuffle_window=8,
        max_steps=8_000 if quick else 80_000,
        updates_per_step=16 if quick else 64,
        out=str(run),
    )
    result = evaluate(run, episodes=10)
    print(f"2. DQN, which saw nothing but these rows, plays {result.returns.mean():.1f} a game")

    env = gymnasium.make("CartPole-v1")
    assembler = EpisodeAssembler()
    with LogReader(logs) as reader:
        episodes = [episode for batch in reader for episode in assembler.add(batch)]
    chance = RandomPolicy(env.observation_space, env.action_space)
    estimate = estimate_return(episodes, chance, gamma=0.9)
    print(
        f"3. a random policy would earn {estimate.value:.2f} ± {estimate.standard_error:.2f} (discounted by 0.9), by "
        f"{estimate.num_episodes} of PPO's games, which are worth {estimate.effective_sample_size:.1f} of its own"
    )

    replay = LogReplayEnv(logs, env.observation_space, env.action_space)
    with CommonPolicyEvaluator(replay, RandomPolicy, rollout_fragment_length=500) as evaluator:
        batch = evaluator.sample()
        returns = [episode.episode_return for episode in evaluator.get_metrics()]
    print(f"4. replayed {batch.count} rows through log_action; the first games returned {returns[:5]}")
    env.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch), "--quick" in sys.argv)
