"""docs/config.md says what the settings say."""

from pathlib import Path

from click.testing import CliRunner

from rlsample.algorithms.presets import ALGORITHMS
from rlsample.algorithms.run_config import option_types, sections_of
from rlsample.cli.config_docs import config_reference
from rlsample.cli.train_command import train

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == config_reference(), "run `make docs`"


def test_every_option_is_a_flag_with_its_help():
    flags = {param.name: param for param in train.params}
    for algo in ALGORITHMS:
        for section, types in option_types(algo).items():
            for name in types:
                assert f"--{name.replace('_', '-')}" in flags[name].opts
                assert flags[name].section == section
                assert flags[name].help
    assert "(ppo only)" in flags["clip_range_schedule"].help
    assert "(ppo, appo only)" in flags["clip_range"].help
    assert "(ppo, a2c only)" in flags["standardize_fields"].help
    assert "(a3c only)" in flags["grads_per_step"].help
    assert "only)" not in flags["gamma"].help
    done = CliRunner().invoke(train, ["--help"])
    headings = [line for line in done.output.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Command:", *(f"{section.capitalize()}:" for section in sections_of("ppo"))]


def test_every_option_has_its_line():
    page = config_reference()
    for algo in ALGORITHMS:
        for types in option_types(algo).values():
            for name in types:
                assert f"\n| `{name}` | " in page
    assert "| `stop_return` | a number or none | `none` | stop once the mean return" in page
    assert "### ppo on CartPole-v1" in page
    assert "## learning, ppo, a2c\n" in page
    assert "## learning, a3c\n" in page
    assert "## workers\n" in page
