"""Planning: the cost of placements in time and memory, on this or on described hardware.

`Task.of` describes a model and its settings, `Hardware` a machine and its network; `plan` prices
strategies, and `Plan` has their front and a choice. Nothing runs, and nothing has numbers::

    from soframe.planning import Hardware, Task, plan

    task = Task.of(model, (torch.empty(32, 3, 224, 224, device="meta"),), method="kfac")
    print(plan(task, ranks=64, hardware=Hardware.load("h100-ib"), memory_limit=2**31))
"""

from soframe.planning.hardware import Collective, Curve, Hardware, Link
from soframe.planning.planner import Option, Plan, Row, plan, usual
from soframe.planning.schedule import Timing
from soframe.planning.task import Task

__all__ = [
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
