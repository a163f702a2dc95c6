"""Trains PPO on CartPole from Python and prints how it went.

python examples/train_cartpole.py            until a mean return of 475 (about ten seconds)
python examples/train_cartpole.py --quick    two iterations
"""

import sys

from rlsample.algorithms import Trainer, TrainSettings

max_steps = 512 if "--quick" in sys.argv else 200_000
with Trainer(TrainSettings(algo="ppo", env="CartPole-v1", stop_return=475, max_steps=max_steps)) as trainer:
    result = trainer.run()
print(result)
