"""Names that modules had before: importing one gives the module that it has become.

Users' code imports classes from where they are written, such as ``soframe.factors.FactorSpec``.
Modules that became folders (``soframe.blocks``, ``soframe.capture``, ``soframe.solving``,
``soframe.statistics``) give their classes themselves.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "accumulation": "gradients.accumulation",
    "agreement": "comm.agreement",
    "applying": "gradients.applying",
    "arguments": "checks.arguments",
    "averaging": "gradients.averaging",
    "background": "solving.background",
    "buckets": "strategies.buckets",
    "building": "setup.building",
    "checksums": "state.checksums",
    "claims": "blocks.claims",
    "clipping": "gradients.clipping",
    "counting": "capture.counting",
    "durable": "state.durable",
    "effect": "gradients.effect",
    "factors": "specs",
    "fisher": "capture.fisher",
    "follow": "state.transfer",
    "joining": "setup.joining",
    "loss_scale": "capture.loss_scale",
    "lr": "gradients.rates",
    "plain_metadata": "state.plain_metadata",
    "refresh": "solving.refresh",
    "registration": "blocks.registration",
    "report": "blocks.report",
    "running": "statistics.running",
    "sampling": "capture.sampling",
    "sharing": "layers.sharing",
    "stacks": "blocks.stacks",
    "worker": "solving.worker",
}
"""Old name -> new name, within soframe."""


class _Finder(MetaPathFinder, Loader):
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        del path, target
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "soframe" and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `importlib.abc.Loader`: the module under its new name."""
        new = "soframe." + MOVED[spec.name.partition(".")[2]]
        warnings.warn(f"{spec.name} has become {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`: it has been executed, and keeps its own specification."""
        module.__spec__ = self._own


def install() -> None:
    """Let old names be found, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last: an old name never hides a module
