"""A preconditioner for DeepSpeed's engine, under ZeRO stages 0 to 3.

::

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    preconditioner = DeepSpeedPreconditioner(engine)
    ...
    engine.backward(loss)
    preconditioner.step()  # between engine.backward() and engine.step(), in each micro-batch
    engine.step()
"""

from __future__ import annotations

from typing import Any

from soframe.integrations.accelerate import require_plain
from soframe.preconditioner import Preconditioner


class DeepSpeedPreconditioner:
    """Steps where the engine does: at the boundary of gradient accumulation.

    Save ``preconditioner.state_dict()``, which every rank must call, in the engine's
    ``client_state``.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        **settings: Further settings of `soframe.Preconditioner`. The optimizer is known already.

    Attributes:
        preconditioner: The preconditioner.

    Raises:
        TypeError: If the optimizer is a `soframe.Optimizer`, which needs none.
        ValueError: If the engine keeps gradients in the host's memory, or trains in float16, or
            without ZeRO in bfloat16; or a setting is out of range.
    """

    def __init__(self, engine: Any, **settings: Any) -> None:
        if engine.fp16_enabled() or (
            engine.zero_optimization_stage() == 0 and engine.bfloat16_enabled()
        ):
            raise ValueError(
                "DeepSpeed's fp16, and bf16 under ZeRO stage 0, keep gradients in copies of their "
                "own, or scale them: use bf16 under ZeRO stage 1 to 3, or train in float32, by "
                "torch_autocast of DeepSpeed's settings in bfloat16 if that is wanted"
            )
        require_plain(engine.optimizer)
        self._engine = engine
        self.preconditioner = Preconditioner(engine, **{"optimizer": engine.optimizer, **settings})

    def step(self) -> None:
        """Precondition the gradients, if this micro-batch is the last before a step.

        The engine clips (``gradient_clipping``) afterwards: what is clipped is the direction.

        Raises:
            RuntimeError: See `soframe.Preconditioner.step`.
            ValueError: See `soframe.Preconditioner.step`.
        """
        if self._engine.is_gradient_accumulation_boundary():
            self.preconditioner.step()
