"""Drives a preconditioner with any method, and holds to what every method owes."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import soframe
from soframe.methods import Method
from soframe.registry import KINDS
from soframe.testing import compare
from tests import kit
from tests.curvature import closing, fill, randn

BATCHES = 7


def network(seed: int = 0) -> nn.Sequential:
    """Two hidden layers of one shape, between layers of others; float64."""
    layers = [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(4, 3))
    fill(model, seed)
    return model


def preconditioner(model: nn.Module, method: object, **settings: Any) -> soframe.Preconditioner:
    """See `kit.precondition`; damped if the method is."""
    return kit.precondition(model, method, **{**damping_for(method), **settings})


def damping_for(*choices: object, damping: float = 0.1) -> dict[str, Any]:
    """A damping as a setting, if any of these methods, or mappings of methods, reads it."""
    methods: list[Any] = []
    for choice in choices:
        methods += choice.values() if isinstance(choice, Mapping) else [choice]
    built = [KINDS["method"].build(one, Method) for one in methods if one is not None]
    return {"damping": damping} if any(one.damped for one in built) else {}


def loss_of(model: nn.Module, number: int) -> Tensor:
    """The loss of one batch of six samples."""
    inputs, targets = randn(6, 5, seed=200 + number), randn(6, 3, seed=300 + number)
    return (model(inputs) - targets).square().sum() / 12


def train(
    model: nn.Module,
    own: soframe.Preconditioner,
    steps: range,
    lr: float = 0.01,
    loss: Callable[[nn.Module, int], Tensor] = loss_of,
) -> None:
    """Take steps of plain gradient descent with what the preconditioner writes."""
    kit.train(model, loss, steps, own, torch.optim.SGD(model.parameters(), lr=lr))


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def same(one: object, other: object) -> bool:
    """Whether two nests of tensors and plain values are equal to the bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        assert isinstance(other, Mapping)
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        assert isinstance(other, list)
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check_resume(method: Method, **settings: Any) -> None:
    """A run that is interrupted and resumed by a fresh preconditioner is the same to the bit."""
    model = network()
    with closing(preconditioner(model, method, **settings)) as own:
        train(model, own, range(3))
        between, saved = copy.deepcopy(model), own.state_dict()
        train(model, own, range(3, BATCHES))
    before = weights(between)
    with closing(preconditioner(between, method, **settings)) as own:
        own.load_state_dict(saved)
        train(between, own, range(3, BATCHES))
    assert same(weights(model), weights(between))
    assert not same(before, weights(between))


def check_shared_instance(make: Callable[[], Method], **settings: Any) -> None:
    """Layers of one shape under one instance train as layers with an instance each."""
    model, apart = network(), network()
    settings = {"auxiliary": "momentum", **settings}
    with closing(preconditioner(model, make(), **settings)) as own:
        train(model, own, range(BATCHES))
        blocks = [block for block in own.blocks if not block.auxiliary]
        states = {block.name.split(".")[0]: block.state for block in blocks}
    each = {f"^{layer}$": make() for layer in states}
    with closing(preconditioner(apart, each, **settings)) as own:
        train(apart, own, range(BATCHES))
    torch.testing.assert_close(weights(model), weights(apart), rtol=1e-12, atol=1e-13)
    assert states["2"].keys() == states["4"].keys()
    assert not any(torch.equal(states["2"][key], states["4"][key]) for key in states["2"])


def check_peer(method: Method, peer: Callable[[list[dict[str, Any]]], Any]) -> None:
    """The hidden layers move as by an optimizer of another library, but for bfloat16's rounding."""
    one, other = network().float(), network().float()
    hidden = [[model[2].weight, model[4].weight] for model in (one, other)]
    group = {"use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(randn(6, 5, seed=step).float()).square().sum()

    with closing(preconditioner(one, method)) as own:
        kit.train(one, loss, range(3), own, torch.optim.SGD(hidden[0], lr=0.02))
    kit.train(other, loss, range(3), peer([{"params": hidden[1], **group}]))
    start = network().float()
    for begun, mine, theirs in zip((start[2].weight, start[4].weight), *hidden, strict=True):
        compare((mine - begun).detach(), (theirs - begun).detach(), "update", rtol=0.03)


def check_nonfinite(method: Method, **settings: Any) -> None:
    """A batch that is not finite changes neither factors, data, states nor parameters."""
    model = network()
    with closing(preconditioner(model, method, **settings)) as own:
        train(model, own, range(3))
        before, parameters = own.state_dict()["blocks"], weights(model)
        train(model, own, range(3, 4), loss=lambda m, n: loss_of(m, n) * float("nan"))
        after = own.state_dict()["blocks"]
        for name in before:
            for key in ("factors", "state", "updates", "masses"):
                assert same(before[name][key], after[name][key]), (name, key)
        assert same(parameters, weights(model))
        assert own.counters["skipped_updates"] == 1
