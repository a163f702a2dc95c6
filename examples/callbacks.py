"""Look into episodes while they run, and add numbers of your own to the metrics."""

from rlsample import Callbacks, CommonPolicyEvaluator, PPOPolicy


class Angles(Callbacks):
    """The largest pole angle of each CartPole episode. Hooks that are not overridden cost nothing."""

    def on_episode_step(self, episode):
        angle = abs(float(episode.last_obs[2]))
        episode.custom_metrics["max_angle"] = max(angle, episode.custom_metrics.get("max_angle", 0.0))

    def on_episode_end(self, episode):
        print(f"slot {episode.env_id}: {episode.length} steps, angle {episode.custom_metrics['max_angle']:.3f}")


with CommonPolicyEvaluator(
    "CartPole-v1", PPOPolicy, num_envs=3, rollout_fragment_length=40, seed=0, vectorize="loop", callbacks=Angles()
) as evaluator:
    evaluator.sample()
    print([episode.custom for episode in evaluator.get_metrics()])
