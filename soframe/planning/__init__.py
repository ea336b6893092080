"""Planning: the cost of placements in time and memory, on this or on described hardware.

`Task.of` describes a model and its settings, `Hardware` a machine and its network; `plan` prices
strategies, and `Plan` has their front and a choice. Nothing runs, and nothing has numbers::

    from soframe.planning import Hardware, Task, plan

    task = Task.of(model, (torch.empty(32, 3, 224, 224, device="meta"),), method="kfac")
    print(plan(task, ranks=64, hardware=Hardware.load("h100-ib"), memory_limit=2**31))
"""

import importlib
from typing import TYPE_CHECKING, Any

from soframe.planning.auto import Auto

# Type checkers see plain imports; at run time these modules load on first access.
if TYPE_CHECKING:
    from soframe.planning.hardware import Collective, Curve, Hardware, Link
    from soframe.planning.planner import Option, Plan, Row, plan, usual
    from soframe.planning.schedule import Timing
    from soframe.planning.task import Task
else:
    _MODULES = {
        "hardware": ("Collective", "Curve", "Hardware", "Link"),
        "planner": ("Option", "Plan", "Row", "plan", "usual"),
        "schedule": ("Timing",),
        "task": ("Task",),
    }

    def __getattr__(name: str) -> Any:
        """Import a part of the planner on first access; a training script needs none."""
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(f"soframe.planning.{module}"), name)
        raise AttributeError(f"module 'soframe.planning' has no attribute {name!r}")


__all__ = [
    "Auto",
    "Collective",
    "Curve",
    "Hardware",
    "Link",
    "Option",
    "Plan",
    "Row",
    "Task",
    "Timing",
    "plan",
    "usual",
]
