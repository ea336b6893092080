"""The report: every parameter once, with its block or the reason why it has none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

import soframe
from soframe.layers import LinearHelper
from soframe.testing import compare
from tests.capture import kit
from tests.capture.kit import (
    WORLDS,
    Case,
    Recorder,
    check,
    descend,
    precondition,
    sequences,
    softplus,
    vectors,
)
from tests.kit import train


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Scaled(nn.Linear):
    """A subclass of a layer that is known, with a parameter that is not."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def parametrised() -> nn.Module:
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def biased() -> nn.Module:
    """Only the bias is computed."""
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "bias", Doubled())
    return layer


class Rich(nn.Module):
    """Everything that a model may hold, in one chain of maps of three features."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.list = nn.ParameterList([torch.ones(3)])
        self.stem = nn.Conv2d(1, 2, (1, 1))
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=True)
        self.decoder.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.norm = nn.LayerNorm(3)
        self.chain = nn.ModuleDict(
            {
                "parametrised": parametrised(),
                "biased": biased(),
                "normed": parametrizations.weight_norm(nn.Linear(3, 3)),
                "spectral": spectral_norm(nn.Linear(3, 3)),
                "scaled": Scaled(),
                "frozen": nn.Linear(3, 3).requires_grad_(False),
                "partly": nn.Linear(3, 3),
                "bare": nn.Linear(3, 3, bias=False),
                "prelu": nn.PReLU(),
            }
        )
        self.chain["partly"].bias.requires_grad_(False)
        self.alias = self.chain["partly"]
        self.bilinear = nn.Bilinear(3, 3, 3)
        self.gru = nn.GRU(3, 3, batch_first=True)
        self.transposed = nn.ConvTranspose2d(2, 2, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.list[0]
        image = self.transposed(self.stem(x.unsqueeze(1)))
        x = image.sum(1) + self.embedding(torch.zeros(x.shape[:2], dtype=torch.long))
        x = self.norm(self.attention(x, x, x)[0])
        for module in self.chain.values():
            x = module(x).tanh()
        x = self.bilinear(x, x) + self.gru(x)[0]
        return self.decoder(x)


REASONS = {
    "scale": "no layer helper; register one with @soframe.register('layer', Rich)",
    "list.0": "no layer helper",
    "embedding.weight": "no layer helper",
    "decoder.bias": "its weight is shared with embedding, which has no block",
    "attention.in_proj_weight": "no layer helper",
    "attention.in_proj_bias": "no layer helper",
    "attention.out_proj.weight": "nn.MultiheadAttention uses its weight without calling it",
    "attention.out_proj.bias": "nn.MultiheadAttention uses its weight without calling it",
    "norm.weight": "no layer helper",
    "norm.bias": "no layer helper",
    "chain.parametrised.bias": "parametrised or computed",
    "chain.parametrised.parametrizations.weight.original": "no layer helper",
    "chain.biased.parametrizations.bias.original": "no layer helper",
    "chain.normed.bias": "parametrised or computed",
    "chain.normed.parametrizations.weight.original0": "no layer helper",
    "chain.normed.parametrizations.weight.original1": "no layer helper",
    "chain.spectral.bias": "parametrised or computed",
    "chain.spectral.weight_orig": "parametrised or computed",
    "chain.scaled.weight": "parameters that LinearHelper does not know: scale",
    "chain.scaled.bias": "parameters that LinearHelper does not know: scale",
    "chain.scaled.scale": "parameters that LinearHelper does not know: scale",
    "chain.frozen.weight": "frozen",
    "chain.frozen.bias": "frozen",
    "chain.partly.bias": "frozen",
    "chain.prelu.weight": "no layer helper",
    "bilinear.weight": "no layer helper",
    "bilinear.bias": "no layer helper",
    "gru.weight_ih_l0": "no layer helper",
    "gru.weight_hh_l0": "no layer helper",
    "gru.bias_ih_l0": "no layer helper",
    "gru.bias_hh_l0": "no layer helper",
}
BLOCKS = {
    "stem.weight": "stem",
    "stem.bias": "stem",
    "chain.biased.weight": "chain.biased",
    "chain.partly.weight": "chain.partly",
    "chain.bare.weight": "chain.bare",
    "transposed.weight": "transposed",
    "transposed.bias": "transposed",
    "unused.weight": "unused",
    "unused.bias": "unused",
}


def rows(preconditioner: Any) -> dict[str, Any]:
    report = list(preconditioner.report())
    named = {row.parameter: row for row in report}
    assert len(named) == len(report)
    return named


def test_every_parameter_is_reported_once() -> None:
    model = Case(Rich).build()
    named = rows(precondition(model))
    assert list(named) == [name for name, _ in model.named_parameters()]
    assert {n: row.block for n, row in named.items() if row.block is not None} == BLOCKS
    assert {n for n, row in named.items() if row.reason} == set(REASONS)
    for name, row in named.items():
        assert row.shape == tuple(model.get_parameter(name).shape)
        assert (row.block is None) == bool(row.reason)
        assert REASONS.get(name, "") in row.reason
        assert row.method == ("kfac / eigen" if row.block is not None else "")
    text = str(precondition(model).report())
    first = text.splitlines()[0]
    assert first.startswith(f"9 of {len(named)} parameters in 6 block(s), ")
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    part = sum(sizes[name] for name in BLOCKS) / sum(sizes.values())
    assert first.endswith(f" {part:.0%} of the trained weights")
    assert 0.1 < part < 0.9
    assert all(name in text for name in named)


def test_the_first_line_has_the_part_of_each_method() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(5, 3))  # 20, 25, 18
    model[2].weight.requires_grad_(False)
    with contextlib.closing(soframe.Optimizer(model, "muon", lr=0.1)) as own:
        first = str(own.report()).splitlines()[0]
        assert own.report().coverage == {"adamw": 28 / 48, "muon": 20 / 48}
    assert first == (
        "4 of 5 parameters in 4 block(s), 100% of the trained weights: 58% adamw, 42% muon"
    )


def test_rich_model_trains_and_only_blocks_change_their_gradients() -> None:
    """Raw gradients stay bit for bit; every block's is the dense result."""
    model, raw, twin = (Case(Rich).build() for _ in range(3))
    unregistered = ("decoder", "attention.out_proj", "chain.scaled", "chain.frozen", "unused")
    computed = ("chain.parametrised", "chain.normed", "chain.spectral")
    recorder = Recorder(twin, (*unregistered, *computed, "chain.biased"))
    preconditioner = precondition(model)
    for each in (model, raw, twin):
        softplus(each(sequences(0))).backward()
    preconditioner.step()
    recorder.step(len(sequences(0)))
    for name, parameter in model.named_parameters():
        if name in BLOCKS and name.startswith(("stem", "chain.partly", "chain.bare")):
            compare(parameter.grad, twin.get_parameter(name).grad, name)
            assert not torch.equal(parameter.grad, raw.get_parameter(name).grad)
        elif name not in BLOCKS:
            before = raw.get_parameter(name).grad
            assert parameter.grad is before is None or torch.equal(parameter.grad, before), name
    notes = {
        name for name, row in rows(preconditioner).items() if "no statistics so far" in row.note
    }
    assert notes == {"unused.weight", "unused.bias"}
    for step in range(1, 4):
        model.zero_grad()
        softplus(model(sequences(step))).backward()
        preconditioner.step()
        descend(model)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x)[0])


@pytest.mark.parametrize("world_size", WORLDS)
def test_attention(world_size: int) -> None:
    """The output projection, whose module is never called, keeps its raw gradient."""
    check(Case(Attention, data=sequences, raw=("attention.out_proj",)), world_size)


class Recurrent(nn.Module):
    """A layer of the user's that returns a tuple, registered for a helper by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Pair(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)[0]


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_layer_that_returns_no_tensor_is_named() -> None:
    model = Case(Recurrent).build()
    # Its hooks live as long as it does.
    preconditioner = precondition(model, layers={"first": LinearHelper})
    with pytest.raises(TypeError, match=r"first: LinearHelper serves modules that return one"):
        model(vectors(0))
    preconditioner.close()


def test_layer_that_returns_no_tensor_can_be_skipped() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Case(Recurrent).build()).double()
    preconditioner = precondition(model, skip=["Pair"])
    softplus(model(vectors(0))).backward()
    preconditioner.step()
    assert rows(preconditioner)["1.first.weight"].reason == "Pair: skipped by 'Pair'"


LAZY: list[Callable[[], nn.Module]] = [lambda: nn.LazyLinear(3), lambda: nn.LazyConv2d(2, 1)]


@pytest.mark.parametrize("lazy", LAZY)
def test_lazy_module_is_an_error_until_its_first_forward(lazy: Callable[[], nn.Module]) -> None:
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "late": lazy()})
    with pytest.raises(ValueError, match=r"'late' \(Lazy\w+\) is lazy .* run one forward pass"):
        precondition(model)
    model["late"](
        torch.zeros(2, 3) if isinstance(model["late"], nn.Linear) else torch.zeros(1, 3, 2, 2)
    )
    assert rows(precondition(model))["late.weight"].block == "late"


# -- skip --------------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.stem = nn.Conv2d(1, 1, 1)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x[:, None, None])[:, 0, 0]))


@pytest.mark.parametrize(
    ("skip", "blocks"),
    [
        ([], ["body.0", "body.2", "stem", "head"]),
        (["head"], ["body.0", "body.2", "stem"]),
        (["^body"], ["stem", "head"]),
        ([r"body\.0"], ["body.2", "stem", "head"]),
        (["Linear"], ["stem"]),
        (("Conv2d", "head"), ["body.0", "body.2"]),
        (["^b", "2$"], ["stem", "head"]),
    ],
)
def test_skip(skip: list[str], blocks: list[str]) -> None:
    """Skipped layers keep their raw gradients, the others the dense result."""
    unused = [pattern for pattern in skip if pattern == "2$"]  # only "^b" comes to be asked
    model, raw, twin = (Case(Network).build() for _ in range(3))
    with warnings.catch_warnings():
        if unused:
            warnings.simplefilter("ignore")
        preconditioner = precondition(model, skip=skip)
    named = rows(preconditioner)
    assert [b.name for b in preconditioner.blocks] == blocks
    skipped = [n for n, _ in model.named_modules() if f"{n}.weight" in named and n not in blocks]
    recorder = Recorder(twin, tuple(skipped))
    for each in (model, raw, twin):
        softplus(each(vectors(0))).backward()
    preconditioner.step()
    recorder.step(len(vectors(0)))
    for name, parameter in model.named_parameters():
        compare(parameter.grad, twin.get_parameter(name).grad, name)
        same = torch.equal(parameter.grad, raw.get_parameter(name).grad)
        assert same == (name.rpartition(".")[0] in skipped)
        assert named[name].reason.startswith(("Linear: skipped by", "Conv2d: skipped by")) == same


def test_unused_pattern_warns_where_the_user_wrote_it() -> None:
    with pytest.warns(
        UserWarning, match=r"no module matches the pattern\(s\) 'decoder', 'haed'"
    ) as seen:
        preconditioner = _build(skip=["haed", "stem", "decoder"])
    assert len(seen) == 1
    assert seen[0].filename == kit.__file__
    assert [b.name for b in preconditioner.blocks] == ["body.0", "body.2", "head"]


def _build(**options: Any) -> Any:
    return precondition(Case(Network).build(), **options)


def test_string_for_skip_is_refused() -> None:
    with pytest.raises(TypeError, match=r"pass \['head'\]"):
        _build(skip="head")


def test_nothing_to_precondition_is_an_error_with_the_reasons() -> None:
    """One line for each class of modules and reason, however many parameters there are."""
    layers = [nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(100)]
    with pytest.raises(
        ValueError, match=r"nothing to precondition in Sequential:\n0 of 400 "
    ) as error:
        precondition(nn.Sequential(*layers), skip=["Linear"])
    _, _, *lines, remedy = str(error.value).splitlines()
    assert remedy.startswith("soframe.Optimizer(model, method='soap', lr=3e-3) trains these")
    OPTIONAL = "no layer helper by default; layers='all' adds LayerNormHelper"
    assert lines == [
        "  200, such as 0.0.weight: Linear: skipped by 'Linear'",
        f"  200, such as 0.1.weight: LayerNorm: {OPTIONAL}",
    ]
    with (
        pytest.warns(UserWarning, match="no module"),
        pytest.raises(ValueError, match="trains the"),
    ):
        precondition(layers[0], method={"^0": "soap", "": "kfac"}, skip=["."])
    with pytest.raises(ValueError, match="nothing to precondition") as error:
        precondition(layers[0], method="soap", skip=["."])
    assert "trains these" not in str(error.value)


def test_skipped_lazy_module_is_no_error() -> None:
    """The message says: or skip the module."""
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "late": nn.LazyLinear(3)})
    named = rows(precondition(model, skip=["late"]))
    assert named["late.weight"].block is None


def test_skip_by_any_name_of_a_module() -> None:
    """A module under two names is skipped by either."""
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
    model["alias"] = model["other"]
    named = rows(precondition(model, skip=["alias"]))
    assert named["other.weight"].block is None


# The compiler looks at tensors.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("method", ["kfac", "muon"])
@pytest.mark.slow
def test_wrappers_of_single_modules_leave_names_statistics_and_states(method: str) -> None:
    """Wrapped after soframe was built; and its state goes on without them."""

    def loss(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).double()
        return softplus(model(x))

    def make() -> tuple[nn.Sequential, soframe.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
        return model, soframe.Optimizer(model, method, lr=0.1)

    model, optimizer = make()
    expected = train(model, loss, range(4), optimizer)
    for wrap in (checkpoint_wrapper, partial(torch.compile, backend="eager")):
        model, optimizer = make()
        model[0] = wrap(model[0])
        train(model, loss, range(2), optimizer)
        names = [row.parameter for row in optimizer.report()]
        assert names == ["0.0.weight", "0.0.bias", "2.weight", "2.bias"]
        other, again = make()
        again.load_state_dict(optimizer.state_dict())
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()).detach(), other.parameters()
        )
        assert torch.equal(train(model, loss, [2, 3], optimizer), expected)
        assert torch.equal(train(other, loss, [2, 3], again), expected)


class Largest(TorchDispatchMode):
    """Notes the most elements that an operator has returned."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("layers", [{}, "all"])
def test_registration_makes_no_tensor_of_the_size_of_a_weight(layers: Any) -> None:
    """At 7B such tensors take half a minute; views count too, and there are none."""
    model = nn.Sequential(nn.Embedding(300, 40), nn.Linear(40, 80), nn.Linear(80, 300, bias=False))
    with Largest() as largest:
        own = soframe.Preconditioner(model, kl_clip=None, layers=layers)
    assert largest.elements < 40 * 80
    own.close()
