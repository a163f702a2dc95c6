"""The evaluator by hand: sample rows, look at them, learn from them."""

from rlsample import CommonPolicyEvaluator, PPOPolicy

with CommonPolicyEvaluator("CartPole-v1", PPOPolicy, num_envs=8, rollout_fragment_length=32, seed=0) as evaluator:
    for _ in range(10):
        batch = evaluator.sample()
        stats = evaluator.compute_apply(batch)
        returns = [episode.episode_return for episode in evaluator.get_metrics()]
        print(f"{batch.count} rows, loss {stats['loss']:.3f}, returns {returns}")
    print(batch)
    print("final observations differ from the next rows:", batch["next_obs"][batch["terminated"]][:2])
