"""Pipelines: the stages of a model on this rank and on others, and their schedule.

A schedule of ``torch.distributed.pipelining`` has the process group of its stages, their modules on
this rank, the number of micro-batches, and whether it divides gradients by that number after the
backward passes. Other pipelines are described by the process group alone.

Numbers are gathered and reduced in the order of the ranks, so that all stages have the same bits.
Each rank is in one pipe and among the copies of one stage: an agreement over one of these groups,
then over the other, is an agreement of all.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from soframe.blocks.block import Block
from soframe.blocks.heads import heads_of
from soframe.blocks.registration import Registration, unwrap, warn_unused
from soframe.comm.agreement import (
    add_over_ranks,
    by_rank,
    compare_settings,
    describe_error,
    fingerprint,
    gather_json,
    gather_texts,
    require_common,
    say_failed,
)
from soframe.comm.base import Backend
from soframe.comm.distributed import TorchDistributed
from soframe.comm.report import Report
from soframe.comm.stages import PHASE, STAGES, Stages

_DEEPSPEED = "deepspeed.runtime.pipe.module"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_TIED = 1e9  # above the number of any stage
_NOTHING = hashlib.sha256().digest()
_COPIES = (
    "pass Distribution(backend=soframe.comm.TorchDistributed(group)) with the process group of "
    "the copies of a stage, such as mesh.get_group('dp'), or 'single' where each stage is there "
    "once"
)


class Pipeline(Stages):
    """The stages on the ranks of a process group; for the choice see `soframe.Distribution`."""

    backend: Backend

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.backend = TorchDistributed(group)
        self._names: list[list[str]] = []

    @staticmethod
    def of(choice: object) -> Pipeline:
        """Return the pipeline of a schedule, a process group or the dimension of a mesh."""
        if _is_schedule(choice):
            return ScheduledPipeline(choice)
        if isinstance(choice, dist.ProcessGroup):
            return Pipeline(choice)
        if not isinstance(choice, DeviceMesh):
            raise TypeError(
                f"pipeline must be a schedule of torch.distributed.pipelining, or the process "
                f"group or the dimension of a DeviceMesh over which stages are spread, not "
                f"{choice!r}"
            )
        if choice.ndim != 1:
            raise ValueError(
                f"pipeline= takes the one dimension of a DeviceMesh over which stages are "
                f"spread, such as mesh['pp'], not a mesh of {choice.ndim} dimensions"
            )
        return Pipeline(choice.get_group())

    @property
    def name(self) -> str:  # type: ignore[override]  # a constant there
        return f"rank {self.backend.rank} of {self.backend.world_size}"

    def require_backend(self, backend: Backend | None) -> None:
        if backend is None:
            if self.backend.world_size < dist.get_world_size():
                raise ValueError(
                    f"the stages of pipeline= are on {self.backend.world_size} of "
                    f"{dist.get_world_size()} ranks, and others may have copies of them: {_COPIES}"
                )
        elif backend.process_group is not None:
            both = sorted(set(backend.global_ranks) & set(self.backend.global_ranks))
            if len(both) > 1:
                raise ValueError(
                    f"ranks {both} are copies of one stage, by backend=, and hold different "
                    f"stages, by pipeline=: {_COPIES}"
                )

    def require_settings(self, *, probed: bool, scaled: bool) -> None:
        if probed:
            raise ValueError(
                "fisher='monte-carlo' and 'type-2' send vectors backward from the model's outputs "
                "to all layers, which end at the first module of a stage: with pipeline= pass "
                "Statistics(fisher='empirical') or 'forward-only'"
            )
        if scaled:
            raise ValueError(
                "grad_scaler= does not go together with pipeline=: a GradScaler sees what is not "
                "finite on its own stage alone, so that the scales of stages part, and other "
                "stages step where it skips. Use bfloat16, which needs none, or float32"
            )

    def require_served(self, model: Any, blocks: Sequence[Block]) -> None:
        # Stages of DeepSpeed may share weights.
        module = sys.modules.get(_DEEPSPEED)
        if module is None or not isinstance(model, module.PipelineModule):
            return
        tied: set[nn.Parameter] = set()
        for key in model.tied_comms:
            tied.update(model.tied_modules[key].parameters())
        for block in blocks:
            if not tied.isdisjoint(block.parameters.values()):
                raise ValueError(
                    f"{block.name} belongs to a layer that DeepSpeed ties over stages, and each "
                    f"stage would make another update of its gradient, so that its copies would "
                    f"part: leave it out (skip=[{block.name!r}])"
                )

    def say_failed(self, error: BaseException) -> None:
        say_failed(self.backend, error)

    def meet(self, model: nn.Module, settings: str) -> nn.Module | None:
        """Return the module with the head; raise if settings differ or a stage cannot start."""
        compare_settings(self.backend, _NOTHING, settings)
        # The head is a weight that is tied to an embedding, or else the end of the last stage.
        modules, last = self._modules(model)
        ranks: dict[float, nn.Module] = {}
        for index, module in modules.items():
            heads = heads_of(model, module)
            if not heads.weights:
                continue
            if heads.tied:
                ranks[_TIED + 1 + index] = module
            elif index == last:
                ranks[1 + index] = module
        return ranks.get(self.largest(max(ranks, default=0)))

    def _modules(self, model: nn.Module) -> tuple[Mapping[int, nn.Module], int]:
        """Return the modules of this rank's stages by their index, and the last of all indices."""
        return {self.backend.rank: model}, self.backend.world_size - 1

    def look_over(self, registration: Registration) -> None:
        local = [[block.name for block in registration.blocks], registration.unused]
        self._names, unused_of_ranks = [], list[list[str]]()
        for names, patterns in gather_json(self.backend, local, PHASE):
            self._names.append(names)
            unused_of_ranks.append(patterns)
        if not any(self._names):
            raise ValueError(
                f"there is nothing to precondition in any stage; in those of this rank:\n"
                f"{registration.report.reasons()}"
            )
        unused = set(registration.unused).intersection(*unused_of_ranks)
        if unused:
            warn_unused(sorted(unused))

    def own_part(self, saved: Any) -> Any:
        """Return this rank's part of a whole model's state; other states unchanged."""
        blocks, names = saved.get("blocks"), self._names[self.backend.rank]
        if saved.get(STAGES, self.name) != self.name:
            raise ValueError(
                f"the state is that of stages {saved[STAGES]}, and this rank has {self.name}: load "
                f"what this rank has saved, or what soframe.checkpoint.merge makes of all"
            )
        if STAGES in saved or not isinstance(blocks, Mapping) or set(blocks) == set(names):
            return saved
        every = list(itertools.chain.from_iterable(self._names))
        if len(every) > len(set(every)):
            raise ValueError(
                "the state is that of a whole model, and the stages of this pipeline have blocks "
                "of the same names: let modules have the names that they have in the whole model"
            )
        if set(blocks) != set(every):
            return saved  # a later check names the difference
        return {**saved, "blocks": {name: blocks[name] for name in names}}

    def _miscounted(self, passes: float) -> Exception | None:
        """Return an error if the number of backward passes differs from the schedule's."""
        return None

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any kind: the other stages wait for it
            self._raise_on_all_stages(error)
        else:
            self._raise_on_all_stages(None)

    def put_together(
        self, report: Report, common: Mapping[str, object], error: Exception | None
    ) -> tuple[Report, Exception | None]:
        """Reduce a report over stages; a ValueError is returned if they differ."""
        numbers = report.numbers()
        count = len(numbers)
        numbers += fingerprint(common)
        local = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        rows = self._gather(local)  # a row for each stage
        reports = [report.with_numbers(row) for row in rows[:, :count].tolist()]
        reduced = report.with_numbers(rows[:, :count].amax(0).tolist())
        if reduced.failed:
            return reduced, error
        if error := _differing_samples(reports, reduced.passes):
            return reduced, error
        try:
            require_common(self.backend, common, rows[:, count:].sum(0).tolist())
        except ValueError as differ:
            text = f"the stages of the pipeline differ (ranks are those of a pipe): {differ}"
            return reduced, ValueError(text)
        return reduced, self._miscounted(reduced.passes)

    def spread(self, error: Exception | None) -> Exception | None:
        texts = gather_texts(self.backend, describe_error(error), PHASE)
        if error is not None or not any(texts):
            return error
        errors = by_rank(texts, " of the pipe")
        return RuntimeError(f"another stage of the pipeline cannot go on, so none does. {errors}")

    def _raise_on_all_stages(self, error: Exception | None) -> None:
        """Raise an error, the same on all copies of this stage, on all stages; None for none."""
        if self.any(error is not None):
            error = self.spread(error)
        if error is not None:
            raise error

    def any(self, flag: bool) -> bool:
        return bool(self._gather(torch.tensor([float(flag)], device="cpu")).any())

    def largest(self, number: float) -> float:
        return float(self._gather(torch.tensor([number], dtype=torch.float64, device="cpu")).max())

    def total(self, number: Tensor) -> Tensor:
        """Return the sum over stages, computed in float64."""
        return self._gather(number.detach().double().reshape(1)).sum().to(number)

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        return add_over_ranks(self.backend, numbers)

    def _gather(self, numbers: Tensor) -> Tensor:
        """Return every stage's numbers, ``[ranks, numbers]``."""
        backend = self.backend
        # Rows of zeros but for this rank's own: their sum has the bits of all.
        rows = numbers.new_zeros(backend.world_size, len(numbers))
        rows[backend.rank] = numbers
        rows = rows.to(backend.wire_device(rows.device))
        backend.all_reduce(rows, PHASE).wait()
        return rows


class ScheduledPipeline(Pipeline):
    """A pipeline whose stages are those of a schedule of ``torch.distributed.pipelining``."""

    def __init__(self, schedule: Any) -> None:
        super().__init__(_stages(schedule)[0].group)
        self._schedule = schedule
        self._parts: dict[nn.Parameter, int] = {}  # the index of its stage among this rank's

    @property
    def name(self) -> str:  # type: ignore[override]  # a constant there
        stages = _stages(self._schedule)
        numbers = ", ".join(str(stage.stage_index) for stage in stages)
        return f"{numbers} of {stages[0].num_stages}"

    def require_uncounted(self) -> None:
        raise ValueError(
            "count() applies to the next forward pass, and a schedule runs the forward passes of "
            "all micro-batches: pass Statistics(samples=...), a callable that returns "
            "how many terms the loss of one micro-batch is a mean over"
        )

    def require_served(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        super().require_served(model, blocks)
        self._parts = {}  # modules may have been replaced
        for part, stage in enumerate(_stages(self._schedule)):
            self._parts.update(dict.fromkeys(stage.submod.parameters(), part))
        for block in blocks:
            for name, parameter in block.parameters.items():
                if parameter not in self._parts:
                    raise ValueError(
                        f"{block.name}.{name} is in no stage that the schedule given as pipeline= "
                        f"runs on this rank: build the Preconditioner of the modules of this "
                        f"rank's stages alone (nn.ModuleList of several), or skip the module "
                        f"(skip=[{block.name!r}])"
                    )
        model_parameters = set(model.parameters())
        for parameter, part in self._parts.items():
            if parameter not in model_parameters:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} of this rank's stage "
                    f"{_stages(self._schedule)[part].stage_index} is not in the given model: build "
                    f"one Preconditioner of the modules of all stages of this rank (nn.ModuleList "
                    f"of several)"
                )
        captured = [block for block in blocks if block.captured]
        if captured and _splits(self._schedule):
            raise ValueError(
                f"{type(self._schedule).__name__} computes the gradients of inputs and of weights "
                f"in passes apart (zero bubble), and {captured[0].method!r} takes its statistics "
                f"where both are computed: choose ScheduleGPipe, Schedule1F1B or "
                f"ScheduleInterleaved1F1B, or a method of gradients alone, such as 'muon' or "
                f"'soap'"
            )

    def _modules(self, model: nn.Module) -> tuple[Mapping[int, nn.Module], int]:
        stages = _stages(self._schedule)
        return {stage.stage_index: stage.submod for stage in stages}, stages[0].num_stages - 1

    def roots(self, model: nn.Module) -> Sequence[nn.Module]:
        return [unwrap(stage.submod) for stage in _stages(self._schedule)]

    def stage_of(self, block: Block) -> int:
        return self._parts.get(next(iter(block.parameters.values())), 0)

    @property
    def _divisor(self) -> float:
        """The schedule's divisor of gradients after the backward passes."""
        return float(self._schedule._n_microbatches) if self._schedule.scale_grads else 1.0

    def scaled(self, loss_scale: Callable[[], float]) -> Callable[[], float]:
        return lambda: loss_scale() * self._divisor

    def _miscounted(self, passes: float) -> Exception | None:
        divisor = self._divisor
        if not self._schedule.scale_grads or passes in (0, divisor):
            return None
        return RuntimeError(
            f"{passes:.0f} backward passes of each stage have given statistics since the last "
            f"step, and the schedule that was given as pipeline= runs {divisor:.0f} "
            f"micro-batches and divides gradients by {divisor:.0f}: gradients and statistics "
            f"would be of different scales. Give the schedule that runs, and call its step() "
            f"once for each step; to accumulate over several, pass it scale_grads=False and a "
            f"loss that is divided by all micro-batches"
        )


def _differing_samples(stages: Sequence[Report], passes: float) -> ValueError | None:
    """Return an error if the stages with most backward passes counted different samples."""
    samples: set[float] = set()
    for stage in stages:
        if stage.passes == passes:
            samples.update((stage.samples, stage.fewest))
    if len(samples) < 2:
        return None
    text = ", ".join(f"{number:.0f}" for number in sorted(samples))
    return ValueError(
        f"in the backward passes since the last step the layers of different stages were called "
        f"with different numbers of samples ({text}), so the number of samples of the loss is "
        f"unknown: pass Statistics(samples=...), a callable that returns it for one micro-batch"
    )


def _is_schedule(choice: object) -> bool:
    module = sys.modules.get(_SCHEDULES)
    return module is not None and isinstance(choice, module._PipelineSchedule)


def _stages(schedule: Any) -> list[Any]:
    """Return the stages that a schedule runs on this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def _splits(schedule: Any) -> bool:
    """Return whether gradients of inputs and of weights have separate passes."""
    if any(stage.dw_builder is not None for stage in _stages(schedule)):
        return True
    # The compiled schedule may merge successive halves of a pass.
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order or {}
    kinds: set[str] = set()
    for action in itertools.chain.from_iterable(order.values()):
        if action is not None:
            for part in (action, *(getattr(action, "sub_actions", None) or ())):
                kinds.add(part.computation_type.name)
    return not kinds.isdisjoint({"BACKWARD_INPUT", "BACKWARD_WEIGHT"})
