"""The command line. Nothing heavy is imported before a command runs.

Each command is a file of its own, named in :data:`rlsample.cli.main_group.COMMANDS`.
"""

from rlsample.cli.main_group import main

__all__ = ["main"]
