"""Recommendations run as they are printed, name their page, and plan the memory of the call."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.planning.recommendation import ADVICE
from tests import kit
from tests.curvature import closing, randn

ROOT = Path(soframe.__file__).parents[1]
CLASSES = 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))  # type: ignore[no-any-return]


class First(nn.Module):
    """The first of several outputs."""

    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]


class States(nn.Sequential):
    """A recurrent layer and a head, whose forward returns the states, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, states = self[0](x)
        return self[1](outputs[:, -1]), states


class Adapted(nn.Module):
    """A frozen layer and a trained product of two thin ones, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


def block() -> list[nn.Module]:
    return [Attention(), nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)]


def patches(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.Flatten(2))


def vit() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(patches(8), *block(), nn.Flatten(), nn.Linear(64, CLASSES)), images()


def gpt() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Embedding(11, 8), *block(), nn.Flatten(), nn.Linear(40, CLASSES))
    return model, torch.arange(30).view(6, 5) % 11


class Written(nn.Module):
    """Patches, a raw tensor of positions, and attention that is a function; no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = patches(8), nn.Parameter(torch.zeros(8, 8))
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).mT + self.positions
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        mixed = self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return self.head(mixed.flatten(1))  # type: ignore[no-any-return]


def written() -> tuple[nn.Module, Tensor]:
    return Written(), images()


def images() -> Tensor:
    return randn(6, 3, 16, 8).float()


def resnet() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), images()


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)), randn(6, 5).float()


def lora() -> tuple[nn.Module, Tensor]:
    head = nn.Linear(16, CLASSES).requires_grad_(False)
    return nn.Sequential(Adapted(), nn.GELU(), Adapted(), head), randn(6, 16).float()


def a_number() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1)), randn(6, 4).float()


def rnn() -> tuple[nn.Module, Tensor]:
    lstm = nn.LSTM(4, 5, batch_first=True)
    return nn.Sequential(lstm, First(), nn.Flatten(), nn.Linear(15, 3)), randn(6, 3, 4).float()


def pinn() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, CLASSES)), randn(6, 2).float()


def rnn_with_states() -> tuple[nn.Module, Tensor]:
    return States(nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)), randn(6, 3, 4).float()


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], str]] = {
    "vit": (vit, "transformer"),
    "written": (written, "transformer"),
    "gpt": (gpt, "transformer"),
    "resnet": (resnet, "convolutional"),
    "mlp": (mlp, "dense"),
    "a number": (a_number, "regression"),
    "lora": (lora, "adapters"),
    "rnn": (rnn, "recurrent"),
    "states": (rnn_with_states, "recurrent"),
    "told": (pinn, "pinn"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_call_runs_as_it_is_printed(name: str) -> None:
    torch.manual_seed(0)
    build, kind = MODELS[name]
    model, inputs = build()
    found = soframe.recommend(model)
    if kind == "pinn":  # no layer shows it
        assert 'soframe.recommend(model, kind="pinn")' in str(found)
        found = soframe.recommend(model, kind="pinn")
    assert found.kind == kind
    assert str(found).startswith(found.call)
    scope: dict[str, Any] = {"model": model, "torch": torch, "soframe": soframe}
    exec(found.call, scope)
    optimizer, before = scope["optimizer"], [p.detach().clone() for p in model.parameters()]
    targets = torch.arange(len(inputs)) % CLASSES

    def closure() -> Tensor:
        outputs = model(inputs)
        if kind == "regression":
            return nn.functional.mse_loss(outputs.squeeze(1), targets.float())
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return nn.functional.cross_entropy(logits, targets)

    start = closure().item()
    if hasattr(optimizer, "preconditioner") or "preconditioner" in scope:
        own = scope.get("preconditioner") or optimizer.preconditioner
        plan = {"solver": None, **found.plan}
        with closing(kit.precondition(copy.deepcopy(model), **plan)) as planned:
            used = [[(b.method, b.solver) for b in one.blocks] for one in (own, planned)]
        assert used[0] == used[1]
    steps = [scope["preconditioner"]] if "preconditioner" in scope else []
    kit.train(model, lambda *_: closure(), range(3), *steps, optimizer)
    assert closure().item() < start
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]
    (steps[0] if steps else optimizer).close()


@pytest.mark.parametrize("name", ["gpt", "resnet", "lora"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_memory_is_that_of_the_plan(name: str, ranks: int) -> None:
    model, _ = MODELS[name][0]()
    found = soframe.recommend(model, ranks=ranks)
    assert ("strategy=" in found.call) == (ranks > 1)
    strategies = ["comm-opt", "mem-opt", "sharded"] if ranks > 1 else [found.strategy]
    assert sorted(found.memory) == sorted(strategies)
    for strategy, size in found.memory.items():
        settings: dict[str, Any] = {"solver": None, **found.plan, "strategy": strategy}
        settings["backend"] = soframe.comm.recording.Recording(world_size=ranks)
        with closing(kit.precondition(model, **settings)) as own:
            assert size == max(own.placement.memory(rank)["total"] for rank in range(ranks))


def test_figures_are_of_one_process_or_of_several() -> None:
    model, _ = resnet()
    assert "0.91" in soframe.recommend(model, ranks=4).reason
    assert "0.91" not in soframe.recommend(model).reason
    with pytest.raises(ValueError, match="at least 1, not 0"):
        soframe.recommend(model, ranks=0)


def test_without_batch_norm_a_convolutional_net_has_the_safe_settings() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    found = soframe.recommend(model)
    assert found.kind == "convolutional"
    assert found.call == soframe.recommend(a_number()[0]).call
    assert "without batch norm" in found.reason
    normed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    assert "damping=3e-3" in soframe.recommend(normed).call


def test_a_preconditioner_of_the_model_stays() -> None:
    model, inputs = mlp()
    with closing(kit.precondition(model)) as own:
        soframe.recommend(model)
        kit.train(model, lambda net, _: net(inputs).square().mean(), range(1), own)


def test_pages_exist_and_no_page_is_said_in_the_reason() -> None:
    for advice in ADVICE:
        assert (ROOT / advice.page).is_file() if advice.page else "not measured" in advice.reason


def test_the_page_that_chooses_has_the_same_calls() -> None:
    page = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    for advice in ADVICE:
        assert advice.call.replace("{more}", "") in page
        assert advice.page.removeprefix("docs/") in page
        if advice.lrs is not None:
            assert "({:g} to {:g})".format(*advice.lrs) in page
