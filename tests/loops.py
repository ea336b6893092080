"""A plain float64 K-FAC, which shares no code with soframe, for random training loops.

A `Plain` records the calls of its own copy of a model by hooks of its own, keeps what each backward
pass has left until the next step, and writes out the formulas that the pages promise: of the
factors (`soframe.methods.scaling`), their averages, the damped inverse, and the clips.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm)
Parameters = tuple[tuple[str, nn.Parameter], ...]
"""The trained parameters of a block: "weight", "bias" or both."""


@dataclass
class Forward:
    """A forward pass: its output, and the calls of its layers."""

    output: Tensor
    calls: list[tuple[str, Tensor, Tensor]]  # names of layers, inputs, outputs
    due: frozenset[str]  # the blocks that took statistics then
    number: int
    registered: int = 0  # how often the model had changed


@dataclass
class Sums:
    """What one backward pass has left for a block."""

    number: int  # of the pass
    samples: int  # of its loss
    inputs: Tensor  # the sum of a a^T, [groups, in, in]
    outputs: Tensor  # the sum of g g^T, [groups, out, out]
    rows: int


@dataclass
class Averages:
    """The state of a block."""

    factors: dict[str, Tensor] = field(default_factory=dict)  # "A" and "G"
    mass: float = 0.0
    solved: dict[str, Tensor] | None = None  # the factors at the last solve
    damping: float = 0.0  # of the last solve
    is_new: bool = False  # whether the factors have changed since
    missed: int = 0  # 1: was not used when statistics were due; 2: and was used since


class Plain:
    """A model, and what K-FAC makes of its gradients.

    Args:
        model: A float64 model.
        settings: ``damping``, ``decay``, ``statistics_every`` and ``solve_every``, functions of the
            step; ``solver``, ``loss_average``, ``fisher``, ``kl_clip`` and ``norm_clip``.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        self.model, self.settings = model, settings
        self.steps, self.owed, self.skipped, self.skipped_statistics = 0, 0, 0, 0
        self.forwards, self.registrations = 0, 0
        self.recorded: list[tuple[str, Tensor, Tensor]] | None = None
        for name, module in model.named_modules():
            if isinstance(module, LAYERS):
                module.register_forward_hook(self._record(name))
        self.blocks: dict[str, Parameters] = {}
        self.averages: dict[str, Averages] = {}
        self.register()
        self.begin()

    def _record(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if self.recorded is not None:
                self.recorded.append((name, args[0].detach().clone(), output))

        return record

    # -- blocks -----------------------------------------------------------------------------------

    def found(self) -> tuple[dict[str, Parameters], dict[str, str]]:
        """The blocks by the name of their first layer, and the block of each layer."""
        layers: dict[nn.Parameter, list[str]] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, LAYERS):
                layers.setdefault(module.weight, []).append(name)
        blocks: dict[str, Parameters] = {}
        block_of: dict[str, str] = {}
        for first, *others in layers.values():
            named = self.model.get_submodule(first).named_parameters()
            # Layers with one weight have no bias in common.
            trained = tuple(
                (n, p) for n, p in named if p.requires_grad and (n == "weight" or not others)
            )
            # What is frozen as a whole keeps its block.
            if trained := trained or self.blocks.get(first, ()):
                blocks[first] = trained
                block_of |= dict.fromkeys([first, *others], first)
        return blocks, block_of

    @property
    def flags(self) -> list[bool]:
        return [p.requires_grad for p in self.model.parameters()]

    @property
    def changed(self) -> bool:
        return self.flags != self.registered

    def is_frozen(self, name: str) -> bool:
        return not any(p.requires_grad for _, p in self.blocks[name])

    def restart(self) -> None:
        """Begin a window, without the blocks that are frozen."""
        self.blocks = {n: own for n, own in self.blocks.items() if not self.is_frozen(n)}
        self.averages = {name: self.averages[name] for name in self.blocks}
        self.blocks, self.block_of = self.found()
        self.begin()

    def register(self) -> bool:
        """Take the blocks as they are now; return whether any begins anew."""
        self.registrations += 1
        former, before, self.registered = _names(self.blocks), self.averages, self.flags
        self.blocks, self.block_of = self.found()
        self.averages, begins = {}, False
        for name, names in _names(self.blocks).items():
            if name in former and set(names) <= set(former[name]):
                self.averages[name] = before[name]
                if names != former[name]:
                    self._narrow(name, slice(0, -1) if names == ["weight"] else slice(-1, None))
                continue
            self.averages[name], begins = Averages(), True
            if name in former:
                self.sums[name] = []
        return begins

    def _narrow(self, name: str, kept: slice) -> None:
        """Keep the columns of the parameter that is left; it is solved again."""
        averages = self.averages[name]
        averages.solved = None
        if "A" in averages.factors:
            averages.factors["A"] = averages.factors["A"][:, kept, kept]
        for sums in self.sums[name]:
            sums.inputs = sums.inputs[:, kept, kept]

    # -- passes -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a window: what comes before the next step."""
        every = self.settings["statistics_every"](self.steps)
        is_turn = self.owed > 0 or self.steps % every == 0
        self.due = frozenset(n for n, a in self.averages.items() if is_turn or a.missed > 1)
        self.sums: dict[str, list[Sums]] = {name: [] for name in self.blocks}
        self.since = dict.fromkeys(self.blocks, 0)  # the first pass that the gradients have
        # The passes by number: their samples, and their forward passes.
        self.passes: dict[int, tuple[int, tuple[int, ...]]] = {}
        # By block a parameter, its gradient after the last pass, and the version of that.
        self.marks: dict[str, tuple[nn.Parameter, Tensor, int]] = {}
        self.count = 0

    def forward(self, x: Tensor, module: str = "") -> Forward:
        """Call the model, or a module of it by itself."""
        self.recorded = []
        output = self.model.get_submodule(module)(x)
        calls, self.recorded = self.recorded, None
        self.forwards += 1
        return Forward(output, calls, self.due, self.forwards, self.registrations)

    def backward(
        self,
        loss: Tensor,
        forwards: Sequence[Forward],
        samples: int,
        only: Sequence[str] | None = None,
    ) -> None:
        """Add to gradients, perhaps of some parameters alone, and take statistics."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if only is not None:
            named = {name: named[name] for name in only}
        calls = [call for forward in forwards for call in forward.calls if call[2].requires_grad]
        ends = [output for *_, output in calls]
        found = torch.autograd.grad(
            loss, [*ends, *named.values()], allow_unused=True, retain_graph=True
        )
        reached: dict[str, list[tuple[Tensor, Tensor]]] = {}
        # Calls of a window in which other layers were due have not kept what is needed, and hooks
        # from before a change are gone.
        seen = (self.due, self.registrations)
        if self.due and all((f.due, f.registered) == seen for f in forwards):
            for (name, inputs, _), gradient in zip(calls, found, strict=False):
                block = self.block_of.get(name)
                if block is None or gradient is None:
                    continue
                if any(p is own for p in named.values() for _, own in self.blocks[block]):
                    rows = self.rows(name, block, inputs, gradient)
                    reached.setdefault(block, []).append(rows)
        if reached and not self.observes:
            self._add(reached, forwards, samples)
        for parameter, gradient in zip(named.values(), found[len(ends) :], strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient.clone()
        for block in reached:
            given = [p for _, p in self.blocks[block] if p.grad is not None]
            if self.sums[block] and given:
                gradient = given[0].grad
                assert gradient is not None
                self.marks[block] = (given[0], gradient, gradient._version)

    @property
    def observes(self) -> bool:
        return self.settings["fisher"] == "type-2"

    def observe(self, forward: Forward, samples: int) -> None:
        """Take the statistics of the type-2 Fisher of half the squared error: its Hessian is I."""
        if not self.due or not self.observes:
            return
        calls = []
        for call in forward.calls:
            block = self.block_of.get(call[0])
            if block is not None and not self.is_frozen(block) and call[2].requires_grad:
                calls.append(call)
        entries = forward.output.flatten(1).sum(0)
        reached: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for number, entry in enumerate(entries):
            ends = [output for *_, output in calls]
            found = torch.autograd.grad(entry, ends, retain_graph=True)
            for (name, inputs, _), gradient in zip(calls, found, strict=True):
                block = self.block_of[name]
                a, g = self.rows(name, block, inputs, gradient)
                reached.setdefault(block, []).append((a[:, : None if number == 0 else 0], g))
        self._add(reached, [forward], samples, len(entries))

    def _add(
        self,
        reached: Mapping[str, Sequence[tuple[Tensor, Tensor]]],
        forwards: Sequence[Forward],
        samples: int,
        columns: int = 1,
    ) -> None:
        number, self.count = self.count, self.count + 1
        self._drop_zeroed(number)
        through = tuple(sorted(forward.number for forward in forwards))
        for earlier, (_, others) in self.passes.items():
            if others == through:
                number = earlier  # other parts of the same loss
        self.passes[number] = (samples, through)
        for block, calls in reached.items():
            rows = sum(g.shape[1] for _, g in calls) // columns
            if block in self.due and rows:
                a = torch.stack([x.mT @ x for x, _ in calls]).sum(0)
                g = torch.stack([y.mT @ y for _, y in calls]).sum(0)
                self.sums[block].append(Sums(number, samples, a, g, rows))

    def _drop_zeroed(self, number: int) -> None:
        """Drop the statistics of gradients that were zeroed before a pass."""
        changed: dict[str, Tensor] = {}
        zeroed: list[str] = []
        for block, (parameter, gradient, version) in self.marks.items():
            now = parameter.grad
            if now is None:
                zeroed.append(block)
            elif now is not gradient or now._version != version:
                changed[block] = now
        if not any(bool(now.any()) for now in changed.values()):
            zeroed += changed
        for block in zeroed:
            self.sums[block], self.since[block] = [], number
            del self.marks[block]
        used = {sums.number for of_block in self.sums.values() for sums in of_block}
        for earlier, (samples, _) in list(self.passes.items()):
            # The zeros of a pass without samples are there as long as any other gradient.
            if zeroed and earlier not in used and (samples or not used):
                del self.passes[earlier]

    def rows(
        self, name: str, block: str, inputs: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The inputs and output gradients of a call, ``[groups, rows, features]``."""
        module = self.model.get_submodule(name)
        a, g = inputs.reshape(1, -1, inputs.shape[-1]), gradient
        if isinstance(module, nn.Conv2d):
            a, g = F.unfold(inputs, module.kernel_size).mT.flatten(0, 1)[None], g.movedim(1, -1)
        elif isinstance(module, nn.Embedding):
            a = F.one_hot(inputs.flatten(), module.num_embeddings).to(g)[None]
        g = g.reshape(1, -1, g.shape[-1])
        if isinstance(module, nn.LayerNorm):  # each feature is a layer
            a = F.layer_norm(a, module.normalized_shape).permute(2, 1, 0)
            g = g.permute(2, 1, 0)
        ones = torch.ones_like(a[..., :1])
        parts = {"weight": a, "bias": ones}
        return torch.cat([parts[which] for which, _ in self.blocks[block]], 2), g

    # -- the step ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Precondition the gradients."""
        self._follow_changes()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if self.due:
            self._fold(is_finite=is_finite)
        else:
            self._note_missed()
        damping = self.settings["damping"](self.steps)
        is_turn = self.steps % self.settings["solve_every"](self.steps) == 0
        for name, block in self.averages.items():
            is_due = is_turn and (block.is_new or not self.is_frozen(name))
            if block.mass > 0 and (is_due or block.solved is None):
                block.solved, block.damping, block.is_new = dict(block.factors), damping, False
        if not (is_finite and self._write(damping)):
            self.skipped += 1
            for gradient in gradients:
                gradient.zero_()
        self.steps += 1
        self.owed = max(0, self.owed - 1)
        if not self.curved:
            self.owed = 1
        self.begin()

    @property
    def curved(self) -> bool:
        return any(block.mass > 0 for block in self.averages.values())

    def _follow_changes(self) -> None:
        """Register layers that were frozen or thawed."""
        if not self.changed:
            return
        if self.register():
            self.owed = 2
        self.sums = {name: self.sums.get(name, []) for name in self.blocks}
        self.since = {name: self.since.get(name, 0) for name in self.blocks}
        self.marks = {n: mark for n, mark in self.marks.items() if n in self.blocks}

    def _fold(self, *, is_finite: bool) -> None:
        """Average the statistics of the window into the factors, if all are finite."""
        for of_block in self.sums.values():
            for sums in of_block:
                is_finite &= bool(sums.inputs.isfinite().all() & sums.outputs.isfinite().all())
        if not is_finite:
            self.skipped_statistics += 1
            if not self.curved:
                self.owed = 2
            return
        decay = self.settings["decay"](self.steps)
        for name in self.due & self.blocks.keys():
            new = self._statistics(name)
            if new is None:
                continue
            block = self.averages[name]
            block.mass, block.is_new = decay * block.mass + 1 - decay, True
            for which, value in new.items():
                old = block.factors.get(which, torch.zeros_like(value))
                block.factors[which] = old + (1 - decay) / block.mass * (value - old)
        self._note_missed()

    def _note_missed(self) -> None:
        for name, block in self.averages.items():
            is_used = self._has_gradient(name) or (self.observes and bool(self.sums[name]))
            if name not in self.due:
                block.missed = 2 if is_used and block.missed else block.missed
            else:
                block.missed = 0 if is_used else max(block.missed, 1)

    def _has_gradient(self, name: str) -> bool:
        return any(p.grad is not None for _, p in self.blocks[name])

    def _statistics(self, name: str) -> dict[str, Tensor] | None:
        """A and G of the window; None if it has none for a block."""
        counted = [sums for sums in self.sums[name] if sums.samples]
        # Observed ones are of the outputs, on which the loss need not depend.
        if not counted or not (self.observes or self._has_gradient(name)):
            return None
        sizes = [n for number, (n, _) in self.passes.items() if number >= self.since[name]]
        average, passes = self.settings["loss_average"], len(sizes)
        inputs, outputs = [], []
        rows = 0.0
        for sums in counted:
            weight = 1 / (passes * sums.samples) if average == "local" else 1.0
            scale = {"local": passes * sums.samples, "global": sum(sizes), "sum": 1}[average]
            scale = 1 if self.observes else scale
            inputs.append(weight * sums.inputs)
            outputs.append(weight * scale**2 * sums.outputs)
            rows += weight * sums.rows
        # Samples that did not reach the layer count for A; passes without samples for nothing.
        weights = [1 / passes if average == "local" else n for n in sizes if n]
        a, g = torch.stack(inputs).sum(0) / sum(weights), torch.stack(outputs).sum(0) / rows
        if isinstance(self.model.get_submodule(name), nn.Embedding):
            a = torch.diag_embed(a.diagonal(dim1=1, dim2=2))
        return {"A": a, "G": g}

    def _write(self, damping: float) -> bool:
        """Replace gradients by updates, and clip these; return False if one is out of range."""
        updates: dict[str, Tensor] = {}
        product = length = 0.0
        for name, block in self.averages.items():
            if block.solved is None or not self._has_gradient(name):
                continue
            matrix = self._matrix(name)
            update = updates[name] = self._direction(block, matrix, damping)
            product += float((update * matrix).sum())
            length += float(update.square().sum() / update.shape[1])
        factor, kl, norm = 1.0, self.settings["kl_clip"], self.settings["norm_clip"]
        clipped = [kl is None or math.isfinite(product), norm is None or math.isfinite(length)]
        if not all(clipped):
            return False
        if kl is not None and product:
            factor = min(factor, math.sqrt(kl / abs(product)))
        if norm is not None and length:
            factor = min(factor, norm / math.sqrt(length))
        for name, update in updates.items():
            self._put(name, factor * update)
        return True

    def _direction(self, block: Averages, matrix: Tensor, damping: float) -> Tensor:
        assert block.solved is not None
        directions = []
        for w, a, g in zip(matrix, block.solved["A"], block.solved["G"], strict=True):
            if self.settings["solver"] == "eigen":
                dense = torch.kron(g, a) + damping * torch.eye(w.numel()).to(w)
                directions.append(torch.linalg.solve(dense, w.flatten()).view_as(w))
                continue
            of_a, of_g = a.trace() / len(a), g.trace() / len(g)
            pi = torch.sqrt(of_a / of_g) if of_a > 0 and of_g > 0 else torch.ones(())
            root = math.sqrt(block.damping)
            damped_a = a + pi * root * torch.eye(len(a)).to(a)
            damped_g = g + root / pi * torch.eye(len(g)).to(g)
            half = torch.linalg.solve(damped_a, w, left=False)
            directions.append(torch.linalg.solve(damped_g, half))
        return torch.stack(directions)

    def _columns(self, name: str, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """A value of a parameter as columns of the block's matrix, ``[groups, out, columns]``."""
        module = self.model.get_submodule(name)
        if isinstance(module, nn.LayerNorm):
            return value.view(-1, 1, 1)
        if isinstance(module, nn.Embedding):
            return value.T[None]
        return value.reshape(1, len(parameter), -1)

    def _matrix(self, name: str) -> Tensor:
        columns = []
        for _, parameter in self.blocks[name]:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            columns.append(self._columns(name, parameter, gradient))
        return torch.cat(columns, 2)

    def _put(self, name: str, update: Tensor) -> None:
        for _, parameter in self.blocks[name]:
            width = self._columns(name, parameter, parameter.detach()).shape[2]
            part, update = update[..., :width], update[..., width:]
            if isinstance(self.model.get_submodule(name), nn.Embedding):
                part = part[0].T
            if parameter.grad is not None:
                parameter.grad.copy_(part.reshape(parameter.shape))

    # -- states -----------------------------------------------------------------------------------

    def state_dict(self) -> Any:
        """All but the window and the weights."""
        counts = (self.steps, self.owed, self.skipped, self.skipped_statistics)
        return copy.deepcopy((counts, self.averages))

    def load_state_dict(self, state: Any) -> None:
        """Go back to a state, with a new window."""
        counts, averages = copy.deepcopy(state)
        self.averages = {name: averages.get(name, Averages()) for name in self.blocks}
        self.steps, self.owed, self.skipped, self.skipped_statistics = counts
        self.begin()


def _names(blocks: Mapping[str, Parameters]) -> dict[str, list[str]]:
    return {name: [which for which, _ in trained] for name, trained in blocks.items()}
