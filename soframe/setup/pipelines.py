"""Pipelines: which stages of a model this rank has, who has the others, and how they are run.

A schedule of ``torch.distributed.pipelining`` knows all of it: the process group over which its
stages are spread, the modules of those that this rank has, the number of micro-batches, and whether
it divides gradients by that number once all backward passes are done. Of a pipeline of another kind
the process group tells with whom to agree.

Nothing here imports a pipeline: where nobody has, there is none.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from soframe.blocks.block import Block
from soframe.blocks.registration import Registration, head_of, warn_unused
from soframe.comm.base import Backend
from soframe.comm.distributed import TorchDistributed
from soframe.comm.stages import Stages

_DEEPSPEED = "deepspeed.runtime.pipe.module"
_SCHEDULES = "torch.distributed.pipelining.schedules"
STAGES = "stages"
"""Where a state has whose it is."""
_TIED = 1e9  # above the number of any stage
LOOKS = 2
"""Steps at which a preconditioner looks for a schedule that was made after it."""


class Pipeline:
    """The pipeline that a model's modules are a part of.

    Args:
        choice: A schedule of ``torch.distributed.pipelining``; a process group, or a `DeviceMesh`
            of one dimension, over which the stages of a pipeline of another kind are spread; None
            for no pipeline.

    Attributes:
        stages: The ranks of this pipe.

    Raises:
        TypeError: If it is something else.
        ValueError: If it is a mesh of several dimensions.
        RuntimeError: If torch.distributed is not initialised.
    """

    def __init__(self, choice: object = None) -> None:
        self._schedule: Any = None
        group: dist.ProcessGroup | None = None
        if choice is None:
            pass
        elif _is_schedule(choice):
            self._schedule = choice
            group = _stages(choice)[0].group
        elif isinstance(choice, DeviceMesh):
            if choice.ndim != 1:
                raise ValueError(
                    f"pipeline= takes the one dimension of a DeviceMesh over which stages are "
                    f"spread, such as mesh['pp'], not a mesh of {choice.ndim} dimensions"
                )
            group = choice.get_group()
        elif isinstance(choice, dist.ProcessGroup):
            group = choice
        else:
            raise TypeError(
                f"pipeline must be a schedule of torch.distributed.pipelining, or the process "
                f"group or the dimension of a DeviceMesh over which stages are spread, not "
                f"{choice!r}"
            )
        self.stages = Stages(None if choice is None else TorchDistributed(group))
        self._parts = self._find_parts()
        self._looks = 0
        self._names: list[list[str]] = []

    @property
    def backend(self) -> Backend | None:
        """The backend of the ranks of this pipe; None where there is none."""
        return self.stages.backend

    # -- parts: the stages of this rank -------------------------------------------------------

    def _find_parts(self) -> dict[nn.Parameter, int]:
        stages = [] if self._schedule is None else _stages(self._schedule)
        return {p: part for part, stage in enumerate(stages) for p in stage.submod.parameters()}

    def part_of(self, block: Block) -> int:
        """Return which of this rank's stages a block belongs to: a backward pass is one stage's.

        Args:
            block: The block.
        """
        return self._parts.get(next(iter(block.parameters.values())), 0)

    def find_head(self, model: nn.Module) -> nn.Module | None:
        """Return the module that has the head of the whole model.

        That is a weight which is tied to an embedding, or else the last linear layer of the last
        stage that has any: in a pipeline without a schedule, of the last rank.

        Args:
            model: The modules of this rank's stages.

        Returns:
            A stage's module, or None where another rank has it.
        """
        if self.backend is None:
            return None
        if self._schedule is None:
            own = {self.backend.rank: model}
        else:
            own = {stage.stage_index: stage.submod for stage in _stages(self._schedule)}
        ranks: dict[float, nn.Module] = {}
        for index, module in own.items():
            weight, tied = head_of(model, module)
            if weight is not None:
                ranks[1 + index + _TIED * tied] = module
        return ranks.get(self.stages.largest(max(ranks, default=0)))

    def look_over(self, registration: Registration) -> None:
        """Look at what the stages have together, once all are registered.

        Args:
            registration: That of this rank's stages.

        Raises:
            ValueError: If no stage has any block.
        """
        if self.backend is None:
            return
        mine = [[block.name for block in registration.blocks], registration.unused]
        every = [json.loads(text) for text in self.stages.texts(json.dumps(mine))]
        self._names = [names for names, _ in every]
        if not any(self._names):
            raise ValueError(
                f"there is nothing to precondition in any stage; in those of this rank:\n"
                f"{registration.report}"
            )
        unused = set(registration.unused).intersection(*(patterns for _, patterns in every))
        if unused:
            warn_unused(sorted(unused), stacklevel=6)

    # -- states -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Which stages this rank has, as text; empty without a pipeline."""
        if self.backend is None:
            return ""
        if self._schedule is None:
            return f"rank {self.backend.rank} of {self.backend.world_size}"
        stages = _stages(self._schedule)
        numbers = ", ".join(str(stage.stage_index) for stage in stages)
        return f"{numbers} of {stages[0].num_stages}"

    def own_part(self, saved: Any) -> Any:
        """Return what a state has of the stages of this rank.

        Args:
            saved: A state, of these stages or of the whole model; perhaps of something else.

        Returns:
            Of a whole model's state this rank's part; anything else as it is.

        Raises:
            ValueError: If it is that of other stages.
        """
        if self.backend is None or not isinstance(saved, Mapping):
            return saved
        blocks, own = saved.get("blocks"), self._names[self.backend.rank]
        if saved.get(STAGES, self.name) != self.name:
            raise ValueError(
                f"the state is that of stages {saved[STAGES]}, and this rank has {self.name}: load "
                f"what this rank has saved, or what soframe.checkpoint.merge makes of all"
            )
        if STAGES in saved or not isinstance(blocks, Mapping) or set(blocks) == set(own):
            return saved
        every = [name for names in self._names for name in names]
        if len(every) > len(set(every)):
            raise ValueError(
                "the state is that of a whole model, and the stages of this pipeline have blocks "
                "of the same names: let modules have the names that they have in the whole model"
            )
        if set(blocks) != set(every):
            return saved  # the difference is named where it is checked
        return {**saved, "blocks": {name: blocks[name] for name in own}}

    # -- micro-batches ------------------------------------------------------------------------

    @property
    def divides(self) -> float:
        """What gradients are divided by after the backward passes, and output gradients are not."""
        schedule = self._schedule
        scales = schedule is not None and schedule.scale_grads
        return float(schedule._n_microbatches) if scales else 1.0

    def scaled(self, loss_scale: Callable[[], float]) -> Callable[[], float]:
        """Return what tells how much larger output gradients are than those of the gradients.

        Args:
            loss_scale: Returns what the loss is multiplied by.
        """
        return lambda: loss_scale() * self.divides

    def miscounted(self, passes: float) -> Exception | None:
        """Return what is wrong with the number of backward passes before a step, if anything is.

        Args:
            passes: How many gave statistics, of the stage that saw the most; 0 for none.
        """
        divisor = self.divides
        if passes == 0 or self._schedule is None or not self._schedule.scale_grads:
            return None
        if passes != divisor:
            return RuntimeError(
                f"{passes:.0f} backward passes of each stage have given statistics since the last "
                f"step, and the schedule that was given as pipeline= runs {divisor:.0f} "
                f"micro-batches and divides gradients by {divisor:.0f}: gradients and statistics "
                f"would be of different scales. Give the schedule that runs, and call its step() "
                f"once for each step; to accumulate over several, pass it scale_grads=False and a "
                f"loss that is divided by all micro-batches"
            )
        return None

    # -- what is refused ----------------------------------------------------------------------

    def require_fisher(self, *, probed: bool) -> None:
        """Check that statistics can be taken where gradients arrive from another stage.

        Args:
            probed: Whether the Fisher sends vectors backward from the model's outputs.

        Raises:
            ValueError: If it does.
        """
        if probed and self.backend is not None:
            raise ValueError(
                "fisher='monte-carlo' and 'type-2' send vectors backward from the model's outputs "
                "to all layers, which end at the first module of a stage: with pipeline= pass "
                "fisher='empirical' or 'forward-only'"
            )

    def require_unscaled(self, *, scaled: bool) -> None:
        """Check that the loss has no scale that changes.

        Args:
            scaled: Whether a scaler was given.

        Raises:
            ValueError: If one was, and the model has stages on other ranks.
        """
        if scaled and self.backend is not None:
            raise ValueError(
                "grad_scaler= does not go together with pipeline=: a GradScaler sees what is not "
                "finite on its own stage alone, so that the scales of stages part, and other "
                "stages step where it skips. Use bfloat16, which needs none, or float32"
            )

    def require_uncounted(self) -> None:
        """Check that nothing has to be said of the single forward passes.

        Raises:
            ValueError: If a schedule runs them.
        """
        if self._schedule is not None:
            raise ValueError(
                "count() says something of the next forward pass, and a schedule runs those of all "
                "micro-batches by itself: pass a callable samples= that returns how many terms the "
                "loss of one micro-batch is a mean over"
            )

    def require_served(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        """Check that the blocks are those of the stages, and that these run as statistics need.

        Args:
            model: The model.
            blocks: Its blocks.

        Raises:
            ValueError: If a schedule runs these modules that was not given; if one was given that
                has other modules, or whose backward passes come in halves that give no statistics.
        """
        self._require_given(model.parameters())
        if (found := _deepspeeds(model)) is not None:
            if self.backend is None:
                raise ValueError(
                    f"the model is a {type(found).__name__} of DeepSpeed, of which each rank has a "
                    f"stage: give its engine to "
                    f"soframe.integrations.deepspeed.DeepSpeedPreconditioner; or pass "
                    f"pipeline=module._grid.get_pipe_parallel_group() and "
                    f"backend=soframe.comm.TorchDistributed("
                    f"module._grid.get_data_parallel_group())"
                )
            _require_untied(found, blocks)
        if self._schedule is None:
            return
        self._parts = self._find_parts()  # modules may have been replaced
        for block in blocks:
            for name, parameter in block.parameters.items():
                if parameter not in self._parts:
                    raise ValueError(
                        f"{block.name}.{name} is in no stage that the schedule given as pipeline= "
                        f"runs on this rank: build the Preconditioner of the modules of this "
                        f"rank's stages alone (nn.ModuleList of several), or skip the module "
                        f"(skip=[{block.name!r}])"
                    )
        own = set(model.parameters())
        for parameter, part in self._parts.items():
            if parameter not in own:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} of this rank's stage "
                    f"{_stages(self._schedule)[part].stage_index} is not in the given model: build "
                    f"one Preconditioner of the modules of all stages of this rank (nn.ModuleList "
                    f"of several)"
                )
        captured = next((block for block in blocks if block.captured), None)
        if captured is not None and _splits(self._schedule):
            raise ValueError(
                f"{type(self._schedule).__name__} computes the gradients of inputs and of weights "
                f"in passes apart (zero bubble), and {captured.method!r} takes its statistics "
                f"where both are computed: choose ScheduleGPipe, Schedule1F1B or "
                f"ScheduleInterleaved1F1B, or a method of gradients alone, such as 'muon' or "
                f"'soap'"
            )

    def check(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Look, at the first steps, for a schedule that was made since.

        Args:
            parameters: Returns those of the model.

        Raises:
            ValueError: If one runs these modules and was not given.
        """
        if self._schedule is None and self._looks < LOOKS:
            self._looks += 1
            self._require_given(parameters())

    def _require_given(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._schedule is not None or _SCHEDULES not in sys.modules:
            return
        own = {id(parameter) for parameter in parameters}
        found = _running(own)
        if found is not None:
            gc.collect()  # one that only waits for the collector runs nothing
            found = _running(own)
        if found is not None:
            raise ValueError(
                f"a {found} of torch.distributed.pipelining runs modules of this model, whose "
                f"stages clip, skip bad batches and agree together, and which may divide gradients "
                f"by micro-batches after the backward passes: build the schedule first, and pass "
                f"pipeline=schedule (and backend=soframe.comm.TorchDistributed(group), with the "
                f"process group of the copies of a stage, where there are several)"
            )


def require_apart(backend: Backend, pipe: Backend) -> None:
    """Check that the copies of a stage are on other ranks than the other stages.

    Args:
        backend: The backend of the copies.
        pipe: The backend of the stages.

    Raises:
        ValueError: If some rank is both.
    """
    if backend.process_group is None:
        return
    both = sorted(set(backend.global_ranks) & set(pipe.global_ranks))
    if len(both) > 1:
        raise ValueError(
            f"ranks {both} are copies of one stage, by backend=, and hold different stages, by "
            f"pipeline=: {_COPIES}"
        )


_COPIES = (
    "pass backend=soframe.comm.TorchDistributed(group) with the process group of the copies of a "
    "stage, such as mesh.get_group('dp'), or backend='single' where each stage is there once"
)


def require_alone(pipe: Backend) -> None:
    """Check that a stage is there once, where nobody says who has its copies.

    Args:
        pipe: The backend of the stages.

    Raises:
        ValueError: If there are ranks beside those of the pipe, which may have copies.
    """
    if pipe.world_size < dist.get_world_size():
        raise ValueError(
            f"the stages of pipeline= are on {pipe.world_size} of {dist.get_world_size()} ranks, "
            f"and others may have copies of them: {_COPIES}"
        )


def _deepspeeds(model: nn.Module) -> Any:
    """Return the ``PipelineModule`` of DeepSpeed that a model is; None where it is none."""
    module = sys.modules.get(_DEEPSPEED)
    is_one = module is not None and isinstance(model, module.PipelineModule)
    return model if is_one else None


def _require_untied(module: Any, blocks: Sequence[Block]) -> None:
    """Check that no block has a weight that several stages have.

    Raises:
        ValueError: If one has.
    """
    tied = {
        id(parameter): name
        for key in module.tied_comms
        for name, parameter in module.tied_modules[key].named_parameters(prefix=key)
    }
    for block in blocks:
        if any(id(parameter) in tied for parameter in block.parameters.values()):
            raise ValueError(
                f"{block.name} belongs to a layer that DeepSpeed ties over stages, and each stage "
                f"would make another direction of its gradient, so that its copies would part: "
                f"leave it out (skip=[{block.name!r}])"
            )


def _is_schedule(choice: object) -> bool:
    module = sys.modules.get(_SCHEDULES)
    return module is not None and isinstance(choice, module._PipelineSchedule)


def _stages(schedule: Any) -> list[Any]:
    """Return the stages that a schedule runs on this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def _splits(schedule: Any) -> bool:
    """Return whether gradients of inputs and of weights come in passes apart."""
    halves = {"BACKWARD_INPUT", "BACKWARD_WEIGHT"}
    builders = any(stage.dw_builder is not None for stage in _stages(schedule))
    return builders or any(kind in halves for kind in _kinds(schedule))


def _kinds(schedule: Any) -> Iterator[str]:
    """Yield the names of what a schedule does."""
    # In what is run, halves that follow each other may have been put together.
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order or {}
    for action in (one for row in order.values() for one in row if one is not None):
        yield action.computation_type.name
        for inner in getattr(action, "sub_actions", None) or ():
            yield inner.computation_type.name


def _running(parameters: set[int]) -> str | None:
    """Return the class of a schedule that trains some of these parameters, if there is one."""
    for schedule in _live_schedules():
        if not getattr(schedule, "_has_backward", False):
            continue
        stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
        modules = [stage.submod for stage in stages if stage is not None]
        if any(id(p) in parameters for module in modules for p in module.parameters()):
            return type(schedule).__name__
    return None


_NONE_AT: dict[int, int] = {}
"""The id of each class of schedules -> how many objects referred to it when there was none."""


def _live_schedules() -> list[Any]:
    """Return the schedules of this process: objects refer to their classes.

    To go through all objects takes a tenth of a second in a large process. An object counts among
    those that refer to its class, so that there is nothing new where their number is that of the
    last time; without a global lock these counts are not exact, and say nothing.
    """
    kinds: list[type] = [sys.modules[_SCHEDULES]._PipelineSchedule]
    for kind in kinds:
        kinds += set(kind.__subclasses__()).difference(kinds)
    counts = {id(kind): sys.getrefcount(kind) for kind in kinds}
    if counts == _NONE_AT and getattr(sys, "_is_gil_enabled", lambda: True)():
        return []
    schedules = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    _NONE_AT.clear()
    if not schedules:
        _NONE_AT.update(counts)
    return schedules
