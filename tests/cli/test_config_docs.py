"""docs/config.md says what the settings say."""

from pathlib import Path

from rlsample.algorithms.presets import ALGORITHMS
from rlsample.algorithms.run_config import option_types
from rlsample.cli.config_docs import config_reference

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == config_reference(), "run `make docs`"


def test_every_option_has_its_line():
    page = config_reference()
    for algo in ALGORITHMS:
        for types in option_types(algo).values():
            for name in types:
                assert f"\n| `{name}` | " in page
    assert "| `stop_return` | a number or none | `none` | stop once the mean return" in page
    assert "### ppo on CartPole-v1" in page
