"""What the presets say about themselves."""

import dataclasses
import re

from rlsample.algorithms.presets import ALGORITHMS
from rlsample.algorithms.train_settings import TrainSettings
from rlsample.settings import option_help


def test_the_help_of_num_workers_names_the_algorithms_that_want_some():
    (field,) = [f for f in dataclasses.fields(TrainSettings) if f.name == "num_workers"]
    text = option_help(field)
    wanted = {name for name, algorithm in ALGORITHMS.items() if algorithm.num_workers}
    assert {algorithm.num_workers for algorithm in ALGORITHMS.values()} == {0, 2}
    assert set(re.findall(r"\w+", text.split("likes")[1])) & set(ALGORITHMS) == wanted
