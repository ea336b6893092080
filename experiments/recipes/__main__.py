"""The command `python -m experiments.recipes`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from experiments.launch import WorkerError
from experiments.libraries import MissingLibraryError
from experiments.recipes import NAMES, tokens
from experiments.recipes.loop import Outcome, run

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    tyro = importlib.import_module("tyro")
    modules = {name: importlib.import_module(f"experiments.recipes.{name}") for name in NAMES}
    try:
        settings: Any = tyro.extras.subcommand_cli_from_dict(
            {name: module.Settings for name, module in modules.items()}
            | {"tokens": tokens.Settings},
            prog="python -m experiments.recipes",
            description="Train a published model, with soframe or a first-order optimizer.",
            args=arguments,
        )
        if isinstance(settings, tokens.Settings):
            print(", ".join(f"{name}: {n} tokens" for name, n in tokens.write(settings).items()))
            return 0
        module = sys.modules[type(settings).__module__]
        run_module: Callable[[Any], Outcome] | None = getattr(module, "run", None)
        outcome = run(module, settings) if run_module is None else run_module(settings)
        return 0 if outcome.finished else INTERRUPTED
    except KeyboardInterrupt:  # before the first step, or the second one
        return INTERRUPTED
    except (ValueError, OSError, MissingLibraryError, WorkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
