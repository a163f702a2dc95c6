"""The command line's frame: light start-up, short errors, nearest names."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from rlsample.cli import main
from rlsample.cli.error_boundary import short_errors
from rlsample.errors import ConfigError, EnvFailedError


def test_help_and_version_load_nothing_heavy():
    code = (
        "import sys\n"
        "from rlsample.cli import main\n"
        "for words in (['--help'], ['--version'], ['eval', '--help'], ['bench', 'sampling', '--help']):\n"
        "    try:\n        main(words)\n    except SystemExit as done:\n        assert done.code == 0, done.code\n"
        "print(sorted({'torch', 'gymnasium', 'matplotlib', 'tensorboard'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert "rlsample 0." in done.stdout
    assert "train  Train a policy" in done.stdout


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "did you mean 'train'?"), ("xyzzy", "known: bench, envs, eval, serve, train, tune")]
)
def test_unknown_command_names_the_nearest(word, hint):
    done = CliRunner().invoke(main, [word])
    assert done.exit_code == 2
    assert f"unknown command '{word}'; {hint}" in done.output


def failing(error):
    @click.command()
    @short_errors
    def command():
        raise error

    return command


def chained():
    error = EnvFailedError("slot 3, episode step 7: reward is nan", slot=3, episode_step=7)
    error.__cause__ = KeyError("real-cause")
    return error


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (
            ConfigError("unknown option 'gama'; did you mean 'gamma'?"),
            2,
            ["error: unknown option 'gama'; did you mean 'gamma'?"],
        ),
        (
            chained(),
            1,
            [
                "error: slot 3, episode step 7: reward is nan",
                "cause: KeyError: 'real-cause'",
                "(--debug shows where in the env)",
            ],
        ),
        (
            ZeroDivisionError("division by zero"),
            1,
            ["error: ZeroDivisionError: division by zero", "(--debug shows where)"],
        ),
    ],
)
def test_errors_are_a_few_lines_on_stderr(error, code, lines):
    done = CliRunner().invoke(failing(error), [])
    assert done.exit_code == code
    assert done.stderr.splitlines() == lines
    assert done.stdout == ""


def test_debug_lets_the_error_through():
    error = ConfigError("no")
    done = CliRunner().invoke(failing(error), ["--debug"])
    assert done.exception is error


def test_click_errors_keep_their_form():
    done = CliRunner().invoke(failing(click.UsageError("wrong words")), [])
    assert done.exit_code == 2
    assert "Error: wrong words" in done.stderr


def test_interrupt_is_no_traceback():
    done = CliRunner().invoke(failing(KeyboardInterrupt()), [])
    assert done.exit_code == 130
    assert "Traceback" not in done.output
