"""Who saves an optimizer: what knows the states of single parameters alone is refused.

`torch.distributed.checkpoint.state_dict` (``get_state_dict``, ``get_optimizer_state_dict``, and who
calls them: torchtitan, trainers under FSDP2) keeps of ``state_dict()`` the entries ``"state"`` and
``"param_groups"``, and drops others without a word. Before that it has an optimizer whose ``state``
is empty take a step, with gradients that are zeros. What soframe's optimizers remember belongs to
blocks, layers and the whole model: averages would decay, and be gone when they are loaded. Neither
call says whom it is from, so the stack of calls is looked at.
"""

from __future__ import annotations

import inspect

MODULE = "torch.distributed.checkpoint.state_dict"
DEPTH = 8
"""How many calls up to look: torch wraps a step in two or three functions."""


def asked_by_saver_of_parameters() -> bool:
    """Return whether `torch.distributed.checkpoint.state_dict` is among the next calls up."""
    frame = inspect.currentframe()
    for _ in range(DEPTH):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == MODULE:
            return True
    return False


def refuse_saver_of_parameters(optimizer: object) -> None:
    """Check that it is not `torch.distributed.checkpoint.state_dict` that saves or loads a state.

    Args:
        optimizer: The optimizer that is asked.

    Raises:
        RuntimeError: If it is.
    """
    if not asked_by_saver_of_parameters():
        return
    remedy = (
        "Save optimizer.state_dict() itself, on every rank, beside get_model_state_dict(model), "
        "and give it to optimizer.load_state_dict(); torch.distributed.checkpoint.save and load "
        "take the optimizer, too"
    )
    if hasattr(optimizer, "preconditioner"):
        remedy += (
            "; or, where each rank is to write its part, "
            "soframe.checkpoint.part(optimizer.preconditioner), which soframe.checkpoint.load reads"
        )
    raise RuntimeError(
        f"{MODULE} (get_state_dict, set_optimizer_state_dict, ...) keeps what an optimizer has for "
        f"single parameters, and would drop the rest of what soframe.{type(optimizer).__name__} "
        f"remembers. {remedy}"
    )
