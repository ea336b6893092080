"""Derivatives by the tape are those of the plain twin, and cost fewer products."""

import copy
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import soframe
from soframe.derivatives import tape
from soframe.derivatives.forward import Forward, Outputs
from soframe.derivatives.replay import Replay
from soframe.derivatives.tape import Tape
from soframe.testing import compare
from tests.curvature import fill, half_square, randn
from tests.trust_region.kit import vector


class Sigmoids(nn.Module):
    """Functions as methods and functions, several inputs of one layer, a reused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(x))
        hidden = self.again(hidden).tanh() + torch.relu(self.again(2 * hidden))
        return torch.cat([hidden, hidden.sigmoid() * 3, hidden.relu()], 1)


class Branches(nn.Module):
    """Nonlinearities of a parameter, of a view, and of what is needed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight.tanh().sigmoid()
        hidden = self.first(x)
        both = hidden.tanh() + hidden.T.sigmoid().T * hidden.sigmoid()
        return F.linear(torch.relu(both), weight).tanh() + F.linear(hidden, self.last.weight)


class Viewed(nn.Module):
    """A view of what a nonlinearity is the last to need."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        view = hidden.T
        return hidden.tanh() + 3 * view.T


class Temporaries(nn.Module):
    """Intermediate tensors die at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for factor in range(6):
            scale = torch.full(x.shape, float(factor), dtype=x.dtype).mul(2.0)
            total = total + self.layer(x + factor).tanh() * scale
        return total


class Noisy(nn.Module):
    """The same random functions of the same tensor, twice: their results differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        views = F.dropout(hidden, 0.5) * F.dropout(hidden, 0.5).cos()
        noise = torch.randn_like(hidden) - torch.randn_like(hidden)
        return self.last((views + noise).tanh())


class Constants(nn.Module):
    """What is computed without gradients is a constant, to both kinds of differentiation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            scale = hidden.abs().max() + 1
        return self.last(hidden / scale + hidden.sin().detach())


class Square(torch.autograd.Function):
    """No torch function returns what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x * x

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * tangents[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class Unseen(nn.Module):
    """Has such a function within, or for the last one."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 4), last

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Square.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return found if self.last else found.tanh()


class Overwriting(nn.Module):
    """Writes into what it has computed, before or after it was used."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 4), nn.Linear(4, 2), how

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.how == "item":
            hidden[:, 0] = 0.5
        if self.how == "add":
            hidden += 1
        found = self.last(hidden.cos())
        if self.how == "output":
            found[0] = 2.0
        return found


class Single(nn.Module):
    """Goes back to single precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Positions(nn.Module):
    """Rows of three dimensions, attention, layer norm, gelu, dropout; several results; views.

    Attention written out, or torch's; and a maximum, for which there is no rule.
    """

    def __init__(self, fused: bool = False, largest: bool = False) -> None:
        super().__init__()
        self.inputs, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.fused, self.largest = fused, largest

    def attend(self, rows: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(rows, rows, rows)
        scores = (rows @ rows.mT / 2).masked_fill(torch.ones(2, 2).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ rows

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inputs(x.reshape(-1, 2, 3))
        hidden = F.gelu(self.norm(rows + self.attend(rows)))
        first, other = F.dropout(hidden, 0.3).split([1, 3], dim=-1)
        largest = other.sum(dim=-1, keepdim=True)
        if self.largest:
            largest, _ = other.max(dim=-1, keepdim=True)
        hidden = torch.cat([other.T.T if other.ndim == 2 else other, first * largest], dim=-1)
        return F.linear(input=hidden, weight=self.last.weight, bias=self.last.bias).flatten(1)


class Attending(nn.Module):
    """Torch's attention of two heads: queries, keys, values, perhaps a mask; all move."""

    def __init__(self, mask: str = "", **settings: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 6)
        self.bias = nn.Parameter(torch.zeros(2, 3))
        self.mask, self.settings = mask, settings

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 3, 3)
        q, k, v = (
            layer(rows).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mask = None
        if self.mask == "boolean":  # and a query that has no key
            mask = torch.tensor([[True, False, True], [False] * 3])
        elif self.mask:
            mask = self.bias.tanh()
        found = F.scaled_dot_product_attention(q[:, :, :2], k, v, mask, **self.settings)
        return found.flatten(1)


def without_bias_gradient() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


def images(inplace: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 2, padding=1, groups=2), nn.ReLU(inplace=inplace)]
    layers += [nn.BatchNorm2d(4), nn.Conv2d(4, 3, (2, 1), stride=2, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (5, 3)),
    "sigmoids, reuse": (Sigmoids, (5, 3)),
    "branches": (Branches, (5, 3)),
    "viewed": (Viewed, (5, 3)),
    "temporaries": (Temporaries, (5, 3)),
    "positions": (Positions, (4, 6)),
    "fused attention": (lambda: Positions(fused=True), (4, 6)),
    "attention": (Attending, (4, 9)),
    "attention, causal, scaled": (lambda: Attending(is_causal=True, scale=0.7), (4, 9)),
    "attention, boolean mask": (lambda: Attending("boolean"), (4, 9)),
    "attention, mask that moves": (lambda: Attending("bias"), (4, 9)),
    "attention, dropout": (lambda: Attending(dropout_p=0.5), (4, 9)),
    "largest": (lambda: Positions(largest=True), (4, 6)),
    "noisy": (Noisy, (5, 3)),
    "partly frozen": (without_bias_gradient, (5, 3)),
    "convolutions": (images, (3, 2, 4, 4)),
    "in-place": (lambda: images(inplace=True), (3, 2, 4, 4)),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.InstanceNorm2d(2, track_running_stats=True)),
        (3, 2, 4, 4),
    ),
    "evaluation": (lambda: images().eval(), (3, 2, 4, 4)),
    "no gradients": (Constants, (5, 3)),
    "unseen": (lambda: Unseen(last=False), (5, 3)),
    "unseen output": (lambda: Unseen(last=True), (5, 3)),
    "overwritten item": (lambda: Overwriting("item"), (5, 3)),
    "overwritten sum": (lambda: Overwriting("add"), (5, 3)),
    "overwritten output": (lambda: Overwriting("output"), (5, 3)),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU()), (5, 3)),
}


NOT_TAPED = {
    "attention, dropout": "attention has dropout, or shares its keys",
    "largest": "there is no rule for max",
    "in-place": "relu changes its arguments",
    "unseen": "tanh uses a result of something that is no torch function",
    "unseen output": "no torch function returned the model's output",
    "overwritten item": "cos uses what has been changed in place",
    "overwritten sum": "add_ changes its arguments",
    "overwritten output": "the model's output has been changed in place",
}
"""Why the tape cannot be followed."""


class Twins:
    """Two derivatives by the tape, and two by differentiating the gradient."""

    def __init__(self, model: nn.Module, closure: Callable[[], Tensor]) -> None:
        replay = Replay(model)
        self.model, self.outputs, self.tape = model, Outputs(model), Tape(replay.devices)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.directions = [
            [randn(*p.shape, seed=10 * k + i).to(p.dtype) for i, p in enumerate(self.parameters)]
            for k in range(2)
        ]
        found, _ = self.outputs.of(closure, self.tape)
        self.forward = Forward(closure, replay, found, found, self.tape)

    def by_tape(self) -> list[Tensor]:
        rows = self.forward.jacobian_products(self.parameters, self.directions)
        return [output for each in rows for output in each]

    def plain(self) -> list[Tensor]:
        twin = replace(self.forward, tape=Tape(reuse=False))
        twin.tape.kernels |= self.tape.kernels
        rows = twin.jacobian_products(self.parameters, self.directions)
        return [output for each in rows for output in each]

    def compare(self, what: str) -> None:
        for one, other in zip(self.by_tape(), self.plain(), strict=True):
            assert float(other.abs().sum()) > 0
            compare(one, other, what)


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def closure_of(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: model(x).square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_plain_twin(name: str) -> None:
    make, shape = MODELS[name]
    model = make().double()
    x = randn(*shape)
    model(x)  # lazy layers
    fill(model)
    twins = Twins(model, closure_of(model, x))
    buffers = [buffer.clone() for buffer in model.buffers()]
    random = torch.get_rng_state()
    assert twins.tape.holds() == (name not in NOT_TAPED)
    assert twins.tape.problem == NOT_TAPED.get(name)
    twins.compare(name)
    # Nothing is left of it, and directions stay as they were.
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, model.buffers(), buffers))
    again = Twins(model, closure_of(model, x)).directions
    for one, other in zip(twins.directions, again, strict=True):
        assert all(map(torch.equal, one, other))


def test_under_autocast_the_gradient_is_differentiated() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Single(), nn.Linear(4, 2))).float()
    x = randn(5, 3).float()

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    twins = Twins(model, closure)
    assert twins.tape.problem == "linear is called under autocast"
    assert all(tangent.dtype == torch.bfloat16 for tangent in twins.by_tape())
    twins.compare("tangent")


def test_nothing_is_computed_again() -> None:
    """Neither the closure nor a product; a nonlinearity takes one pass for each direction."""
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    model, x = fill(nn.Sequential(*layers)), randn(5, 3)
    runs: list[int] = []

    def closure() -> Tensor:
        runs.append(1)
        return model(x).square().mean()

    twins = Twins(model, closure)
    with Counting() as plain:
        twins.plain()
    with Counting() as count:
        twins.by_tape()
    assert len(runs) == 1
    # Two for the parameters' and the inputs' tangents, but for the first layer's constant inputs.
    assert sum(count.calls.get(name, 0) for name in ("mm", "addmm", "addmm_")) == 2 * 5
    assert sum(plain.calls.get(name, 0) for name in ("mm", "addmm", "addmm_")) > 2 * 5
    assert count.calls["tanh_backward"] == 2 * 2
    assert not {"tanh", "mul", "rsub"} & set(count.calls)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_graph_stays_where_it_is_needed(inplace: bool) -> None:
    """After the backward pass a tape has no use for it."""
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace), nn.Linear(4, 2)))
    twins = Twins(model, closure_of(model, randn(5, 3)))
    twins.forward.backward()
    if inplace:
        twins.compare("tangent")
    else:
        assert all(tangent.any() for tangent in twins.by_tape())
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            twins.forward.outputs[0].sum().backward()


class Aside(nn.Module):
    """Computes something that its output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.aside = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.norm = self.aside(hidden).tanh()
        found: Tensor = hidden.sin()
        return found


def test_what_leads_nowhere_is_forgotten() -> None:
    """Within the model, and after it."""
    model, x, extra = fill(Aside()), randn(5, 3), nn.Linear(4, 4).double()
    twins = Twins(model, lambda: extra(model(x)).square().mean())
    with Counting() as count:
        twins.by_tape()
    assert sum(count.calls.get(name, 0) for name in ("mm", "addmm", "addmm_")) == 2
    twins.compare("tangent")


@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("what", ["inputs", "weights"])
def test_what_has_changed_is_refused(what: str, freed: bool) -> None:
    """By the tape and by its twin, whose graph is freed where a tape could be followed."""
    model, x = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), randn(5, 3)
    twins = Twins(model, closure_of(model, x))
    if freed:
        twins.forward.backward()
    assert twins.tape.holds()
    with torch.no_grad():
        (x if what == "inputs" else model[2].weight).add_(1.0)
    assert not twins.tape.holds()
    with pytest.raises(RuntimeError, match="give each closure inputs of its own"):
        twins.by_tape()


@pytest.mark.parametrize("reuse", [False, True])
def test_closures_that_write_into_one_input_are_refused(reuse: bool) -> None:
    """Before anything has moved."""
    model, x = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), randn(5, 3)
    before = vector(model)
    own = soframe.TrustRegion(model, "squared-error", reuse_activations=reuse)

    def closure(seed: int) -> Tensor:
        with torch.no_grad():
            x.copy_(randn(5, 3, seed=seed))
        return half_square(model(x), randn(5, 2, seed=9 + seed)) / 2

    with pytest.raises(RuntimeError, match="give each closure inputs of its own"):
        own.step([lambda: closure(0), lambda: closure(1)])
    assert torch.equal(vector(model), before)


class Clamped(nn.Module):
    """Changes a weight without gradients, before or after it is used."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.layer, self.when = nn.Linear(3, 4), when

    def clamp(self) -> None:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "before":
            self.clamp()
        hidden: Tensor = self.layer(x).sin()
        if self.when == "after":
            self.clamp()
        return hidden


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_changes_without_gradients(when: str) -> None:
    model = fill(Clamped(when))
    model.clamp()  # so that it changes nothing more, whatever runs again
    twins = Twins(model, closure_of(model, randn(5, 3)))
    assert twins.tape.holds() == (when == "before")
    twins.compare("tangent")


def test_what_has_no_gradient_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a model computes without gradients, nor what statistics take."""
    looked: list[str] = []

    def counting(function: Any, args: Any, kwargs: Any) -> Any:
        looked.append(function.__name__)
        return args, kwargs

    monkeypatch.setattr(tape, "_without_running", counting)
    model, x, y = fill(Constants()), randn(6, 3), randn(6, 2)
    own = soframe.TrustRegion(model, "squared-error", statistics_every=2)
    for _ in range(2):
        own.step(lambda: half_square(model(x), y))
    own.close()
    expected = ["linear", "_set_grad_enabled", "div", "sin", "detach", "add", "linear"]
    assert looked == 2 * expected


def test_a_parameter_that_is_the_output_moves_as_it_does() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(3))

        def forward(self) -> Tensor:
            return self.weight

    model = Bare()
    Twins(model, lambda: model().square().sum()).compare("tangent")


def test_tensors_of_other_kinds_are_not_followed() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x.to_sparse(), self.weight)

    model = Sparse()
    twins = Twins(model, closure_of(model, randn(4, 3)))
    assert twins.tape.problem == "_sparse_mm has to do with tensors of another kind"


def test_complex_numbers_are_not_followed() -> None:
    """A constant of them is a term of a sum, and a Jacobian of theirs is no symmetric one."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight + torch.complex(x @ x.T, x @ x.T)[:, :2]).exp().real

    twins = Twins(model := Complex(), closure_of(model, randn(4, 3)))
    assert twins.tape.problem == "add has to do with tensors of another kind"
    twins.compare("tangent")


def test_the_last_tangents_alone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tangent is let go of once no later function needs it."""
    depth, width = 12, 4
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Sigmoid())]
    model = nn.Sequential(*layers)
    twins = Twins(model, closure_of(model, torch.randn(3, width)))
    made: list[weakref.ref[Tensor]] = []
    most = 0
    rule_of = tape.rule_of

    def counted(*own: Any, **settings: Any) -> Any:
        nonlocal most
        rule = rule_of(*own, **settings)

        def counting(*args: Any, **named: Any) -> Any:
            found = rule(*args, **named)
            made.extend(weakref.ref(tangent) for row in found for tangent in row)
            return found

        most = max(most, len({id(alive) for ref in made if (alive := ref()) is not None}))
        return counting

    monkeypatch.setattr(tape, "rule_of", counted)
    twins.by_tape()
    assert len(made) == 2 * 2 * depth
    assert most == 2


def test_random_numbers_are_those_of_their_calls() -> None:
    """Also of the second call, and whatever was drawn in between."""
    model = fill(Noisy()).double()
    torch.manual_seed(3)
    twins = Twins(model, closure_of(model, randn(5, 3)))
    torch.rand(7)
    twins.compare("tangent")


def test_says_once_why_it_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    tape._tell.cache_clear()
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)))
    with caplog.at_level("INFO", "soframe"):
        for _ in range(3):
            Twins(model, closure_of(model, randn(5, 3)))
    expected = "derivatives differentiate the gradient: relu changes its arguments"
    assert [record.getMessage() for record in caplog.records] == [expected]


def steps_of(model: nn.Module, forward: Callable[[Tensor], Tensor], **settings: Any) -> Tensor:
    """The parameters after some steps, with and without statistics and trials among them."""
    own = soframe.TrustRegion(model, "squared-error", fisher="type-2", **settings)
    for step in range(7):
        x, y = randn(6, 3, seed=step), randn(6, 9, seed=100 + step)
        own.step(lambda x=x, y=y: half_square(forward(x), y))
    own.close()
    return vector(model)


@pytest.mark.parametrize("inplace", [False, True])
def test_whole_steps_are_those_of_the_plain_twin(inplace: bool) -> None:
    """Also where there is no tape to follow."""
    layers = [nn.Linear(3, 4), nn.ReLU(inplace), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 9)]
    first, second = (fill(nn.Sequential(*copy.deepcopy(layers))) for _ in range(2))
    found = steps_of(first, first)
    compare(found, steps_of(second, second, reuse_activations=False), "parameters")


@pytest.mark.slow
def test_compiled_models_run_as_they_are_written() -> None:
    """A compiled graph cannot be noted, and has no derivative along a direction."""
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 9)]
    first, second = (fill(nn.Sequential(*copy.deepcopy(layers))) for _ in range(2))
    x, graphs = randn(6, 3), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(first, backend=backend)
    twins = Twins(first, closure_of(compiled, x))
    assert twins.tape.holds()
    twins.compare("tangent")
    assert not graphs
    found = steps_of(first, compiled)
    compiled(x)
    assert graphs  # those that ask for no derivative
    torch._dynamo.reset()
    compare(found, steps_of(second, second), "parameters")


# -- each rule -------------------------------------------------------------------------------

X, Y = randn(2, 3, 4, seed=50), randn(2, 3, 4, seed=51)
SCALE, SHIFT = randn(4, seed=52), randn(4, seed=53)
OF_CHANNELS = randn(3, seed=54), randn(3, seed=55)
MASK = Y > 0.3
INDEX = torch.tensor([[0, 2], [1, 3]])
COUNTS, TWO = torch.arange(1, 5), torch.tensor(2)

Function = Callable[..., Tensor]


def old_add(x: Tensor, alpha: float, y: Tensor) -> Tensor:
    """A signature that torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.add(x, alpha, y)  # type: ignore[call-overload, no-any-return]


CALLS: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "add": (lambda x, y: x + y, (X, Y)),
    "add a number": (lambda x: 2 + x + 3, (X,)),
    "add a row": (lambda x, row: torch.add(x, row, alpha=2), (X, SCALE)),
    "add a multiple, as before": (lambda x, y: old_add(x, 2, y), (X, Y)),
    "add to a constant": (lambda x: Y[..., :1] + x, (X,)),
    "subtract": (lambda x, y: 3 - x - y * 2, (X, Y)),
    "add integers": (lambda x: COUNTS + x + COUNTS - torch.sub(x.tanh(), COUNTS, alpha=2), (X,)),
    "add booleans": (lambda x: x + MASK, (X,)),
    "multiply": (lambda x, y: x * y * 3, (X, Y)),
    "multiply by integers": (lambda x: x * COUNTS / COUNTS, (X,)),
    "multiply by name": (lambda x, y: torch.mul(input=x, other=y), (X, Y)),
    "divide": (lambda x, y: x / y / 3, (X, Y)),
    "divide rows": (lambda x, row: x / row, (X, SCALE)),
    "divide a number": (lambda x: 2 / x, (X,)),
    "power": (lambda x, y: x.abs() ** y, (X, Y)),
    "power of a number": (lambda x: 2**x, (X,)),
    "matrix product": (lambda x, y: x @ y.mT, (X, Y)),
    "one matrix for all": (torch.matmul, (X, randn(4, 2, seed=56))),
    "matrix of a batch": (lambda x, y: torch.bmm(x, y.transpose(1, 2)), (X, Y)),
    "mask": (lambda x: x.masked_fill(MASK, -2.0), (X,)),
    "where": (lambda x, y: torch.where(MASK, x, y) + torch.where(MASK, x, 4.0), (X, Y)),
    "where, integers and booleans": (
        lambda x: x.where(MASK, COUNTS) + torch.where(MASK, MASK, x) + x.masked_fill(MASK, TWO),
        (X,),
    ),
    "join integers": (
        lambda x: torch.cat([x, COUNTS.expand(2, 3, 4)]) + torch.stack([x[0], MASK[0]])[:, None],
        (X,),
    ),
    "softmax": (lambda x: F.softmax(x, dim=1) * x.softmax(-1), (X,)),
    "elementwise": (
        lambda x: F.silu(x).exp().log1p() + F.leaky_relu(x, 0.2) + x.clamp(min=0),
        (X,),
    ),
    "others": (lambda x: x.square().sqrt() + x.abs().rsqrt() + F.softplus(x) + F.elu(x), (X,)),
    "gelu": (lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"), (X,)),
    "views": (lambda x: x.view(6, 4)[1:4].T.reshape(2, 6).unsqueeze(0).squeeze(0).mT, (X,)),
    "pieces": (lambda x: torch.cat([p.sum(1) for p in x.chunk(2, -1)], 0).mean(0), (X,)),
    "stack": (lambda x, y: torch.stack([x, y.contiguous(), Y.clone()]).permute(3, 0, 1, 2), (X, Y)),
    "unbind": (lambda x: x.unbind(1)[1].expand(3, 2, 4).flip(0).cumsum(0), (X,)),
    "embedding": (lambda w: F.embedding(INDEX, w), (randn(4, 3, seed=57),)),
    "layer norm": (lambda *a: F.layer_norm(a[0], (4,), *a[1:]), (X, SCALE, SHIFT)),
    "layer norm over two": (lambda x: F.layer_norm(x, (3, 4), eps=0.1), (X,)),
    "layer norm, scale alone": (lambda s: F.layer_norm(Y, (4,), s, SHIFT), (SCALE,)),
    "rms norm": (lambda x, s: F.rms_norm(x, (4,), s), (X, SCALE)),
    "batch norm": (
        lambda x, s, b: F.batch_norm(x, None, None, s, b, training=True),
        (X, *OF_CHANNELS),
    ),
    "batch norm, evaluation": (
        lambda x, s, b: F.batch_norm(x, OF_CHANNELS[0], OF_CHANNELS[1].abs(), s, b),
        (X, *OF_CHANNELS),
    ),
    "batch norm of rows": (
        lambda x, s: F.batch_norm(x[0], None, None, s, training=True),
        (X, SCALE),
    ),
    "group norm": (
        lambda x, s, b: F.group_norm(x.transpose(1, 2), 2, weight=s, bias=b),
        (X, SCALE, SHIFT),
    ),
    "instance norm": (lambda x, s: F.instance_norm(x, weight=s), (X, OF_CHANNELS[0])),
    "largest of windows": (lambda x: F.max_pool2d(x, 2, 1, padding=1), (X,)),
    "largest of a row": (lambda x: F.max_pool1d(x, 2), (X,)),
    "means of windows": (lambda x: F.avg_pool2d(x, 2, 1) + F.adaptive_avg_pool2d(x, (1, 1)), (X,)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("still", [False, True])
def test_each_rule_against_forward_mode(name: str, still: bool) -> None:
    """Of all arguments, and of the last alone; by torch's own forward-mode differentiation."""
    function, values = CALLS[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.ParameterList(values)

        def forward(self) -> Tensor:
            return function(*self.values)

    model = Model()
    twins = Twins(model, lambda: model().square().mean())
    for direction in twins.directions if still else []:
        direction[:-1] = [None] * (len(values) - 1)  # type: ignore[list-item]
    assert twins.tape.problem is None
    for direction, found in zip(twins.directions, twins.by_tape(), strict=True):
        full = [
            torch.zeros_like(x) if t is None else t for x, t in zip(values, direction, strict=True)
        ]
        _, expected = torch.func.jvp(function, values, tuple(full))
        compare(found, expected, name)
    twins.compare(name)


def test_dropout_of_what_lies_otherwise_in_memory() -> None:
    """Masks are drawn in the order of the argument, which its tangent need not have."""
    layer = fill(nn.Linear(3, 8))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.layer(x).T + self.layer.bias[:, None], 0.5).sin()

    model = Model()
    twins = Twins(model, closure_of(model, randn(5, 3)))
    assert twins.tape.holds()
    twins.compare("tangent")


def test_a_parameter_that_does_not_move_is_left_out() -> None:
    """Of a direction whose other parameters move, by both."""
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    twins = Twins(model, closure_of(model, randn(5, 3)))
    twins.directions[0][:2] = [None, None]  # type: ignore[list-item]
    twins.directions[1][1:] = [None] * 3  # type: ignore[list-item]
    twins.compare("tangent")
