"""Models that torch.compile has compiled train with the same factors as eager ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook

import soframe
from soframe.testing import compare
from tests import kit

pytestmark = [
    pytest.mark.slow,
    # The compiler's own look at a frame's arguments.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
STEPS = 7
INDUCTOR = pytest.param(
    "inductor",
    3,
    False,
    marks=[
        pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
        pytest.mark.thorough,
    ],
)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.layers = nn.Sequential(nn.Linear(64, 6), nn.GELU(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.norm(self.convolution(x)).relu().flatten(1))
        return self.head(self.layers[2](x) + x)  # one layer twice


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def results(backend: str | None, every: int, eager_statistics: bool) -> dict[str, Tensor]:
    """Return weights and factors after a few steps; without a backend nothing is compiled."""
    torch.manual_seed(0)
    model = Network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    preconditioner = soframe.Preconditioner(
        model, optimizer=optimizer, statistics_every=every, solve_every=2 * every
    )
    compiled: Any = model if backend is None else torch.compile(model, backend=backend)

    def loss(model: nn.Module, _: int) -> Tensor:
        inputs, targets = torch.randn(5, 2, 4, 4).double(), torch.randint(3, (5,))
        forward = model if eager_statistics and preconditioner.takes_statistics else compiled
        return nn.functional.cross_entropy(forward(inputs), targets)

    kit.train(model, loss, range(STEPS), preconditioner, optimizer)
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for block in preconditioner.blocks:
        for name, factor in block.running.items():
            found[f"{block.name} {name}"] = factor.tril()
    preconditioner.close()
    return found


@pytest.mark.parametrize(
    ("backend", "every", "eager_statistics"),
    [
        pytest.param("aot_eager", 1, False, marks=pytest.mark.thorough),
        ("aot_eager", 3, False),
        ("aot_eager", 3, True),
        INDUCTOR,
    ],
)
def test_compiled_is_eager(backend: str, every: int, eager_statistics: bool) -> None:
    wanted = results(None, every, False)
    assert sum(name.endswith((" A", " G")) for name in wanted) == 8
    found = results(backend, every, eager_statistics)
    if every > 1 or not eager_statistics:
        assert counters["stats"]["unique_graphs"] > 0  # something was compiled
    if every > 1 and eager_statistics:  # between statistics steps the hooks are compiled away
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    for name, tensor in wanted.items():
        if backend == "aot_eager":  # the same arithmetic
            assert torch.equal(found[name], tensor), name
        else:
            compare(found[name], tensor, name)


def test_statistics_come_from_a_model_compiled_without() -> None:
    """The graph of a step without statistics is not used at a step with them."""
    torch.manual_seed(0)
    model = Network().double()
    compiled: Any = torch.compile(model, backend="aot_eager")
    preconditioner = soframe.Preconditioner(model, kl_clip=None, statistics_every=2, solve_every=2)

    def step(forward: Any) -> int:
        model.zero_grad()
        forward(torch.randn(5, 2, 4, 4).double()).square().mean().backward()
        taken = sum(block.mass for block in preconditioner.blocks)
        preconditioner.step()
        return sum(block.mass for block in preconditioner.blocks) > taken

    assert [step(f) for f in (model, compiled, compiled, compiled)] == [True, False, True, False]


def test_global_hooks_of_others_change_outputs_of_compiled_layers() -> None:
    """torch calls global hooks before those of a module; what soframe sees comes before both."""

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return 2 * output if isinstance(module, nn.Linear | nn.Conv2d) else None

    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Network().double()
        own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1, solve_every=1)
        if is_compiled:
            model.compile(backend="aot_eager")
            handles = [register_module_forward_hook(double)]
        else:
            handles = [module.register_forward_hook(double) for module in model.modules()]
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(5, 2, 4, 4).double()).square().mean().backward()
            own.step()
        for handle in handles:
            handle.remove()
        found.append([p.grad.clone() for p in model.parameters()])
        own.close()
    assert counters["stats"]["unique_graphs"] > 0
    for plain, compiled in zip(*found, strict=True):
        compare(compiled, plain, "gradient")


def whole_steps(who: str, compiled: str) -> Tensor:
    """Return the weights after a few steps, of which a part or all of each is compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    every: dict[str, Any] = {"statistics_every": 2, "solve_every": 2}
    optimizer: Any
    if who == "preconditioner":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        before = soframe.Preconditioner(model, optimizer=optimizer, **every)
    elif who == "trust region":
        optimizer = soframe.TrustRegion(
            model, "mse", statistics=soframe.Statistics(fisher="type-2")
        )
    elif who == "stochastic":
        optimizer = soframe.StochasticTrustRegion(model)
    else:
        optimizer = soframe.Optimizer(model, who, lr=0.05)

    def closure() -> Tensor:
        return nn.functional.mse_loss(model(x), y)

    def update() -> None:
        if who == "preconditioner":
            before.step()
        optimizer.step()

    def step() -> None:
        if who in ("trust region", "stochastic"):
            optimizer.step(closure)
            return
        optimizer.zero_grad()
        closure().backward()
        (torch.compile(update, backend="eager") if compiled == "update" else update)()

    run = torch.compile(step, backend="eager") if compiled == "step" else step
    for _ in range(4):
        run()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# The compiler looks at the hooks that backward passes call, too, and leaves some of them alone.
@pytest.mark.filterwarnings(
    "ignore:.*(lru_cache|Dynamo does not know how to trace)",
    "ignore:.*StorageWeakRef:pytest.PytestUnraisableExceptionWarning",
)
@pytest.mark.parametrize(
    ("who", "compiled"),
    [
        ("preconditioner", "update"),
        pytest.param("preconditioner", "step", marks=pytest.mark.thorough),
        pytest.param("kfac", "step", marks=pytest.mark.thorough),
        pytest.param("soap", "update", marks=pytest.mark.thorough),
        ("trust region", "step"),
        pytest.param("stochastic", "step", marks=pytest.mark.thorough),
    ],
)
def test_a_step_within_compiled_code_is_the_eager_one(who: str, compiled: str) -> None:
    compare(whole_steps(who, compiled), whole_steps(who, ""), "weights", rtol=1e-12)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_full_graph_of_a_step_is_refused() -> None:
    """By torch, as the step runs between two graphs."""
    model = nn.Sequential(nn.Linear(3, 3))
    own = soframe.Preconditioner(model, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    before = kit.gradients(model)
    compiled = torch.compile(own.step, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled()
    assert all(map(torch.equal, kit.gradients(model), before))
    own.close()


@pytest.mark.parametrize("kind", ["preconditioner", "optimizer", "trust region", "stochastic"])
def test_a_cuda_graph_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and before anything has changed: a step asks the device, which a graph cannot."""
    model = nn.Sequential(nn.Linear(3, 3))
    made: dict[str, Any] = {
        "preconditioner": lambda: soframe.Preconditioner(model, lr=0.1),
        "optimizer": lambda: soframe.Optimizer(model, "muon", lr=0.1),
        "trust region": lambda: soframe.TrustRegion(model, "cross-entropy"),
        "stochastic": lambda: soframe.StochasticTrustRegion(model),
    }
    own = made[kind]()
    weights = [p.detach().clone() for p in model.parameters()]
    closure = (lambda: pytest.fail("it runs"),) if kind in ("trust region", "stochastic") else ()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"\.step cannot be captured in a CUDA graph.*replay"):
        own.step(*closure)
    monkeypatch.undo()
    assert all(map(torch.equal, model.parameters(), weights))
