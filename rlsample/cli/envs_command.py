"""``rlsample envs``: what can be made here by name."""

from __future__ import annotations

import dataclasses
import json

import click

from rlsample.cli.error_boundary import short_errors

__all__ = ["envs"]


@click.command()
@click.argument("word", required=False, default="")
@click.option("--all", "show_all", is_flag=True, help="Also those whose packages are not installed.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@short_errors
def envs(word: str, show_all: bool, as_json: bool) -> None:
    """List the envs that can be made by name; WORD is a part of the id or family."""
    from rlsample.env.catalog import list_all_envs

    records = [r for r in list_all_envs() if word.lower() in f"{r.id} {r.family}".lower()]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(r) for r in records]))
        return
    shown = [r for r in records if r.installed or show_all]
    rows = [("env", "family", "steps", "vector form", "install")]
    for r in shown:
        rows.append((r.id, r.family, str(r.max_episode_steps or "no limit"), "yes" if r.vector else "", r.install))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    hidden = len(records) - len(shown)
    if hidden:
        click.echo(f"{hidden} more need packages that are not installed: rlsample envs --all")
