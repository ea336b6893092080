"""Experts as raw parameters: every expert is a matrix by itself for methods of gradients."""

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.layers import ExpertsHelper
from soframe.methods import SOAP, Method, Muon, Shampoo
from soframe.testing import compare
from tests import kit
from tests.curvature import closing, randn
from tests.distributed.harness import run_ranks
from tests.methods import stages
from tests.methods.test_shampoo import power_of
from tests.methods.test_soap import Published

EXPERTS, HIDDEN, WIDTH, STEPS = 3, 5, 4, 5
SHAPES = {
    "w1": (EXPERTS, HIDDEN, WIDTH),
    "w2": (EXPERTS, WIDTH, HIDDEN),
    "w3": (EXPERTS, 2, HIDDEN, WIDTH),
    "b1": (EXPERTS, HIDDEN),
}
METHODS: dict[str, Method] = {
    "muon": Muon(dtype="float64"),
    "soap": SOAP(),
    "shampoo": Shampoo(0.7, epsilon=0.01, graft=None),
}


class Experts(nn.Module):
    """torchtitan's three parameters in one module, of which one has two leading dimensions."""

    def __init__(self) -> None:
        super().__init__()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(randn(*shape, seed=seed)))


def gradient(name: str, step: int) -> Tensor:
    """Of full rank on both sides, in a sum over steps."""
    return randn(*SHAPES[name], seed=100 * step + len(name) + int(name[1]))


def train(own: soframe.Preconditioner, model: nn.Module, steps: range) -> list[dict[str, Tensor]]:
    """Return the updates of each step."""
    found = []
    for step in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(name, step)
        own.step()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


def run(rank: int, ranks: int, method: str, strategy: str) -> list[dict[str, Tensor]]:
    """Updates by a preconditioner that another one replaces, with its state, after two steps."""
    model = Experts()
    settings = {"strategy": strategy}
    with closing(stages.preconditioner(model, METHODS[method], **settings)) as own:
        updates = train(own, model, range(2))
        state = own.state_dict()
    with closing(stages.preconditioner(model, METHODS[method], **settings)) as own:
        own.load_state_dict(state)
        return updates + train(own, model, range(2, STEPS))


def of_one_matrix(method: str, gradients: list[Tensor]) -> list[Tensor]:
    """The updates of one matrix, by the definition of a method."""
    if method == "soap":
        soap = Published(SOAP(), every=1)
        return [torch.from_numpy(soap.step(one.numpy())) for one in gradients]
    found, buffer = [], torch.zeros_like(gradients[0])
    left, right, mass = buffer @ buffer.T, buffer.T @ buffer, 0.0
    for g in gradients:
        if method == "shampoo":
            left, right, mass = 0.7 * left + g @ g.T, 0.7 * right + g.T @ g, 0.7 * mass + 1
            root, other = (power_of(factor / mass, -0.25, 0.01) for factor in (left, right))
            found.append(root @ g @ other)
            continue
        buffer = 0.95 * buffer + 0.05 * g
        x = 0.95 * buffer + 0.05 * g
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        found.append(x * max(1.0, len(g) / len(g.T)) ** 0.5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "comm-opt"), pytest.param(2, "mem-opt", marks=pytest.mark.distributed)],
)
@pytest.mark.parametrize("method", METHODS)
def test_every_expert_is_a_matrix_by_itself(method: str, ranks: int, strategy: str) -> None:
    """Against a loop over experts; interrupted and resumed."""
    found = [run(0, 1, method, strategy)] if ranks == 1 else run_ranks(run, ranks, method, strategy)
    for name in ("w1", "w2", "w3"):
        given = [gradient(name, step).flatten(0, -3) for step in range(STEPS)]
        each = [of_one_matrix(method, [one[e] for one in given]) for e in range(len(given[0]))]
        for updates in found:
            for step, update in enumerate(updates):
                expected = torch.stack([one[step] for one in each]).view(SHAPES[name])
                compare(update[name], expected, f"{name}, step {step}", rtol=1e-6)


def test_the_report_says_how_dimensions_are_taken() -> None:
    model = nn.Sequential(Experts(), nn.Conv2d(2, 3, 2).double())
    model.register_parameter("positions", nn.Parameter(randn(1, 6, 4)))
    with closing(stages.preconditioner(model, "soap")) as own:
        notes = {row.parameter: row.note for row in own.report()}
        shapes = {block.name: tuple(block.shape) for block in own.blocks}
    assert notes["0.w1"] == "taken as 3 matrices 5x4"
    assert notes["0.w3"] == "taken as 6 matrices 5x4"
    assert notes["1.weight"] == "flattened to a matrix 3x8"
    assert shapes["0.b1"] == (3, 5, 1)
    assert shapes["1.weight"] == (1, 3, 8)
    assert shapes["positions"] == (1, 1, 24)


def test_home_made_convolutions_and_computed_weights_stay_whole() -> None:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.stride = nn.Parameter(randn(3, 2, 2)), 1

    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 2).double())
    with closing(stages.preconditioner(nn.Sequential(Kernel(), conv), "soap")) as own:
        shapes = {block.name: tuple(block.shape) for block in own.blocks}
    assert shapes["0.weight"] == (1, 3, 4)
    assert shapes["1.parametrizations.weight.original1"] == (1, 3, 8)


class First(ExpertsHelper):
    """Serves modules with one parameter alone."""

    parameter = "w1"


def test_a_helper_that_changes_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"layers\['experts'\]=First changes nothing.*w2, w3"):
        kit.precondition(nn.ModuleDict({"experts": Experts()}), "muon", layers={"experts": First})
    alone = nn.ModuleDict({"experts": Experts()})
    for name in ("w2", "w3", "b1"):
        delattr(alone["experts"], name)
    with closing(kit.precondition(alone, "muon", layers={"experts": First})) as own:
        assert [tuple(block.shape) for block in own.blocks] == [(EXPERTS, HIDDEN, WIDTH)]
    both = nn.ModuleDict({"experts": alone["experts"], "other": Experts()})
    settings = {"method": {"^experts$": "kfac", "": "soap"}, "layers": {"": First}}
    with closing(kit.precondition(both, samples=lambda: 1, **settings)) as own:
        assert "experts" in [block.name for block in own.blocks]
