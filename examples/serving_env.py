"""Control inverted: a game that nobody can step, since it calls for actions itself, and a policy that learns from it.

    python examples/serving_env.py [--quick]

Four players share one ServingEnv, each in a thread of its own. A fifth one plays with `training_enabled=False`: it is
answered like the others, but its rows are not learnt from.
"""

import functools
import sys
import threading

import gymnasium

from rlsample.env import ServingEnv
from rlsample.errors import ServingError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet, MetricsWindow
from rlsample.optimizers import SyncSamplesOptimizer, SyncSamplesSettings
from rlsample.policy import PPOPolicy, PPOSettings

game = gymnasium.make("CartPole-v1")


class Arcade(ServingEnv):
    """The players call in; run() only lets them begin and waits for them."""

    def run(self):
        players = [threading.Thread(target=self.play, args=(seat, seat < 4)) for seat in range(5)]
        for player in players:
            player.start()
        for player in players:
            player.join()

    def play(self, seat, learn):
        cartpole = gymnasium.make("CartPole-v1")
        obs, _ = cartpole.reset(seed=seat)
        try:
            while True:
                self.start_episode(training_enabled=learn)
                terminated = truncated = False
                while not (terminated or truncated):
                    action = self.get_action(obs)
                    obs, reward, terminated, truncated, _ = cartpole.step(action)
                    self.log_returns(reward)
                self.end_episode(obs, truncated=truncated and not terminated)
                obs, _ = cartpole.reset()
        except ServingError:  # the evaluator is closed
            cartpole.close()


def main(iterations):
    arcade = Arcade(game.observation_space, game.action_space, max_concurrent=5)
    policy = functools.partial(PPOPolicy, settings=PPOSettings(learning_rate=1e-3))
    with CommonPolicyEvaluator(arcade, policy, num_envs=4, rollout_fragment_length=256, seed=0) as evaluator:
        learning = SyncSamplesSettings(num_sgd_iter=6, minibatch_size=128, standardize_fields=("advantages",))
        optimizer = SyncSamplesOptimizer(EvaluatorSet(evaluator), learning)
        window = MetricsWindow(50)
        for iteration in range(iterations):
            optimizer.step()
            window.add(evaluator.get_metrics())
            if iteration % 5 == 4:
                mean = window.summary()["rollout/ep_rew_mean"]
                print(f"{optimizer.num_steps_sampled:6d} steps learnt from, mean return {mean:6.1f}")
    print("closed: every player was told, and the arcade's thread has ended:", not arcade.is_alive())


if __name__ == "__main__":
    main(5 if "--quick" in sys.argv else 20)
