"""``rlsample``: finds the command and imports its file, and only that."""

from __future__ import annotations

import importlib
import importlib.metadata

import click

from rlsample.errors import unknown_name

__all__ = ["COMMANDS", "LazyGroup", "main"]

COMMANDS = {
    "train": ("rlsample.cli.train_command:train", "Train a policy on an env."),
    "eval": ("rlsample.cli.eval_command:evaluate", "Play episodes with a trained policy."),
    "serve": ("rlsample.cli.serve_command:serve", "Serve a policy over HTTP, and train it meanwhile."),
    "envs": ("rlsample.cli.envs_command:envs", "List the envs that can be made by name."),
    "tune": ("rlsample.cli.tune_command:tune", "Find the fastest layout for an env."),
    "bench": ("rlsample.cli.bench_command:bench", "Measure speed."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for.

    Args:
        lazy: command name -> ("module:attribute", one line of help).
    """

    def __init__(self, *args: object, lazy: dict[str, tuple[str, str]] | None = None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self.lazy[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            ctx.fail(str(unknown_name("command", args[0], self.list_commands(ctx))))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the lazy commands from their one line of help: importing them for it would load torch."""
        eager = [(name, command.get_short_help_str(100)) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy.items()] + eager)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"rlsample {importlib.metadata.version('rlsample')}")
        ctx.exit()


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show it, exit."
)
def main() -> None:
    """Any environment in, training data out."""
