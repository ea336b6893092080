"""The head is left out where the model shows it; elsewhere the report asks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.methods import Momentum
from soframe.methods.base import Candidate
from tests import kit


class Model(nn.Module):
    """Children by name, in the order of their definition; `getters` return some of them."""

    def __init__(
        self, getters: dict[str, str | tuple[str, ...]] | None = None, **children: nn.Module
    ) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        for getter, names in (getters or {}).items():
            every = tuple(map(self.get_submodule, [names] if isinstance(names, str) else names))
            found = every[0] if isinstance(names, str) else every
            setattr(self, getter, lambda found=found: found)


def linear(out: int = 4) -> nn.Linear:
    return nn.Linear(4, out, bias=False)


def tied() -> nn.Module:
    embedding, decoder = nn.Embedding(5, 4), linear(5)
    decoder.weight = embedding.weight
    return Model(embedding=embedding, decoder=decoder, after=linear())


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "tied": (tied, {"embedding"}),
    "first": (lambda: Model(head=linear(3), one=linear(), two=linear()), {"head"}),
    "two": (
        lambda: Model(body=linear(), policy_head=linear(3), value_head=linear(2)),
        {"policy_head", "value_head"},
    ),
    "several": (
        lambda: Model(heads=nn.ModuleList([linear(3), linear(2)]), body=linear()),
        {"heads.0", "heads.1"},
    ),
    "convolution": (
        lambda: Model(one=nn.Conv2d(2, 3, 3), pool=linear(), head=nn.Conv2d(3, 2, 1)),
        {"head"},
    ),
    "end": (lambda: nn.Sequential(linear(), nn.Conv1d(2, 2, 2), nn.Softmax(1)), {"1"}),
    "nested": (
        lambda: Model(one=linear(), classifier=nn.Sequential(linear(), nn.ReLU(), linear(3))),
        {"classifier.2"},
    ),
    "wrapped": (lambda: Model(inner=Model(score=linear(3), body=linear())), {"inner.score"}),
    "alone": (lambda: Model(one=nn.Conv2d(2, 3, 3), two=nn.Conv2d(3, 2, 2), fc=linear()), {"fc"}),
    "transformers": (
        lambda: Model({"get_output_embeddings": "out"}, out=linear(5), one=linear()),
        {"out"},
    ),
    "timm": (
        lambda: Model(
            {"get_classifier": ("out", "distilled")},
            out=linear(5),
            distilled=linear(5),
            one=linear(),
        ),
        {"out", "distilled"},
    ),
}


def routed(
    model: nn.Module, method: Any = "muon", **settings: Any
) -> tuple[dict[str, str], soframe.Report]:
    optimizer = soframe.Optimizer(model, method, lr=0.1, **settings)
    report = optimizer.report()
    optimizer.close()
    methods = {r.parameter[: -len(".weight")]: r.method for r in report if "weight" in r.parameter}
    return methods, report


@pytest.mark.parametrize("name", MODELS)
def test_the_head_alone_is_left_out(name: str) -> None:
    build, heads = MODELS[name]
    methods, report = routed(build())
    assert {layer for layer, method in methods.items() if method == "adamw"} == heads
    assert not any("skip=" in row.note for row in report)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Model(body=linear(), actor=linear(3), critic=linear(2)),
        lambda: Model(embedding=nn.Embedding(5, 4), one=linear(), critic=linear()),
        lambda: nn.Sequential(linear(), Model(one=linear(), critic=linear())),
    ],
    ids=["two heads", "a body", "not the end"],
)
def test_where_no_layer_shows_the_report_asks(model: Callable[[], nn.Module]) -> None:
    """The setting that it names is the one that leaves the layer to the auxiliary method."""
    methods, report = routed(model())
    (asked,) = (row for row in report if "skip=" in row.note)
    layer = asked.parameter[: -len(".weight")]
    assert layer.endswith("critic")
    assert methods[layer] == "muon"
    pattern = asked.note.partition("skip=['")[2].partition("']")[0]
    methods, report = routed(model(), skip=[pattern])
    assert methods[layer] == "adamw"
    assert not any("skip=" in row.note for row in report)
    assert sum(method == "muon" for method in methods.values()) == len(methods) - 1 - (
        "embedding" in methods
    )


GUESSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "perceptron": (lambda: nn.Sequential(linear(), nn.GELU(), linear()), "2"),
    "wrapped": (lambda: Model(inner=nn.Sequential(linear(), linear())), "inner.1"),
    "nested": (lambda: nn.Sequential(linear(), nn.Sequential(linear(), linear())), "1.1"),
    "alone": (lambda: Model(one=nn.Conv2d(2, 3, 3), two=nn.Conv2d(3, 2, 2), fc=linear()), "fc"),
}


@pytest.mark.parametrize("name", GUESSES)
def test_a_guess_is_a_question_whose_answer_is_a_pattern(name: str) -> None:
    """A body without a head ends as a model with one: by default the layer is the auxiliary's."""
    build, last = GUESSES[name]
    methods, report = routed(build())
    (note,) = (row.note for row in report if row.parameter == f"{last}.weight")
    assert methods[last] == "adamw"
    assert note.startswith("it comes last, so it is taken for the head: is it? For a hidden layer")
    methods, report = routed(build(), method=eval(note.partition("method=")[2]))
    assert set(methods.values()) == {"muon"}
    assert not any("taken for the head" in row.note for row in report)


@pytest.mark.parametrize("name", ["first", "nested", "transformers", "timm", "tied"])
def test_what_a_model_shows_is_no_question(name: str) -> None:
    _, report = routed(MODELS[name][0]())
    assert not any("taken for the head" in row.note for row in report)


def test_a_method_that_reads_calls_asks_alike() -> None:
    model = nn.Sequential(linear(), nn.GELU(), linear())
    (_, row) = soframe.Preconditioner(model, "newton-muon", kl_clip=None).report()
    assert row.block is None
    assert "taken for the head" in row.reason


def test_methods_that_take_heads_do_not_ask() -> None:
    model = Model(body=linear(), actor=linear(3), critic=linear(2))
    assert not any("skip=" in row.note for row in kit.precondition(model, "soap").report())


def test_frozen_and_thawed_heads_stay_heads() -> None:
    """So groups and states are those of a run that has never frozen any."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = soframe.Optimizer(model, "muon", lr=0.01)

    def loss(net: nn.Module, step: int) -> Tensor:
        model[2].requires_grad_(step != 1)
        outputs: Tensor = net(torch.ones(2, 4) + step)
        return outputs.square().mean()

    before = [len(group["params"]) for group in optimizer.param_groups]
    kit.train(model, loss, range(3), optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == before == [1, 3]
    optimizer.close()


def test_a_method_is_told_of_heads_and_embeddings() -> None:
    last: dict[str, bool] = {}

    class Noting(Momentum):
        def unsuited(self, candidate: Candidate) -> str | None:
            last[candidate.name] = candidate.last
            return None

    model = nn.Sequential(nn.Embedding(5, 4), linear(), nn.Tanh(), linear(5))
    kit.precondition(model, Noting()).close()
    assert last == {"0.weight": True, "1.weight": False, "3.weight": True}
