"""The `soframe` command.

Its libraries are optional: this module imports none of them, and says what to install where they
are missing. The commands themselves are in `soframe.experiments.commands`.
"""

from __future__ import annotations

import sys

from soframe.experiments.requirements import MissingLibraryError, require


def main() -> None:
    """Runs the command line; the entry point of the `soframe` script."""
    try:
        require("typer", "rich")
        from soframe.experiments.commands import app

        app(prog_name="soframe")
    except MissingLibraryError as error:
        print(f"soframe: {error}", file=sys.stderr)
        sys.exit(1)
