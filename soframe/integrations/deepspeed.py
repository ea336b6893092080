"""A preconditioner for DeepSpeed's engine, under ZeRO stages 0 to 3.

::

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    preconditioner = DeepSpeedPreconditioner(engine)
    ...
    engine.backward(loss)
    preconditioner.step()  # between engine.backward() and engine.step(), in each micro-batch
    engine.step()

A pipeline's engine (``PipelineModule``) runs a whole step, the preconditioner's included: call
``engine.train_batch()`` only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from soframe.comm import TorchDistributed
from soframe.integrations.accelerate import require_plain
from soframe.preconditioner import Preconditioner
from soframe.settings import group_of


class DeepSpeedPreconditioner:
    """Steps with the engine: at the boundary of gradient accumulation.

    Save ``preconditioner.state_dict()``, a collective of all ranks, in the engine's
    ``client_state``. Under a pipeline each rank has the state of its own stage: save it on every
    rank.

    Args:
        engine: The engine returned by ``deepspeed.initialize``.
        **settings: Further settings of `soframe.Preconditioner`, except the optimizer.

    Attributes:
        preconditioner: The `soframe.Preconditioner`.

    Raises:
        TypeError: If the optimizer is a `soframe.Optimizer`, which needs no preconditioner.
        ValueError: If the engine keeps gradients in the host's memory, or trains in float16, or
            without ZeRO in bfloat16; has a pipeline under ZeRO; or a setting is out of range.
    """

    def __init__(self, engine: Any, **settings: Any) -> None:
        require_unscaled(
            fp16=engine.fp16_enabled(),
            bf16=engine.bfloat16_enabled(),
            stage=engine.zero_optimization_stage(),
        )
        require_plain(engine.optimizer)
        self._engine = engine
        settings = {"optimizer": engine.optimizer, **settings}
        self._pipelined = hasattr(engine, "train_batch")
        if not self._pipelined:
            self.preconditioner = Preconditioner(engine, **settings)
            return
        if engine.zero_optimization_stage() > 0:
            raise ValueError(
                "a pipeline of DeepSpeed under ZeRO is not served: leave zero_optimization out of "
                "DeepSpeed's settings, and pass strategy='sharded' to spread the curvature over "
                "the copies of a stage"
            )
        grid = engine.grid
        settings["distribution"] = replace(
            group_of("distribution", settings),
            pipeline=grid.get_pipe_parallel_group(),
            backend=TorchDistributed(grid.get_data_parallel_group()),
        )
        self.preconditioner = Preconditioner(engine.module, **settings)
        # It preconditions the gradients that the engine's optimizer is about to use.
        engine.optimizer.register_step_pre_hook(lambda *_: self.preconditioner.step())

    def step(self) -> None:
        """Precondition the gradients, if this micro-batch is the last before a step.

        The engine clips (``gradient_clipping``) the preconditioned gradients afterwards.

        Raises:
            RuntimeError: If a pipeline's engine calls it already; see
                `soframe.Preconditioner.step`.
            ValueError: See `soframe.Preconditioner.step`.
        """
        if self._pipelined:
            raise RuntimeError(
                "engine.train_batch() of a pipeline takes the whole step, and has the gradients "
                "preconditioned before its optimizer's: leave step() out"
            )
        if self._engine.is_gradient_accumulation_boundary():
            self.preconditioner.step()


def require_unscaled(*, fp16: bool, bf16: bool, stage: int) -> None:
    """Raise a ValueError if DeepSpeed scales gradients, or keeps them in copies of its own."""
    if fp16 or (bf16 and stage == 0):
        raise ValueError(
            "DeepSpeed's fp16, and bf16 under ZeRO stage 0, keep gradients in copies of their own, "
            "or scale them: use bf16 under ZeRO stage 1 to 3, or train in float32, by "
            "torch_autocast of DeepSpeed's settings in bfloat16 if that is wanted"
        )
