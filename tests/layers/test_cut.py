"""Packed projections in parts: each is a matrix for methods that read gradients alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.layers.layout import CutLayout, PlainLayout
from soframe.methods import SOAP, Chain, Muon, NorMuon, Shampoo
from soframe.strategies import Sharded
from soframe.testing import check_method, compare
from tests import kit
from tests.curvature import closing, randn
from tests.distributed.harness import run_ranks
from tests.layers.test_conv1d import Named
from tests.methods import stages

WIDTH, HEADS = 4, 2


def qkv(kind: str) -> tuple[nn.Module, str, str]:
    """A module of packed projections, a pattern for it, and the name of its weight."""
    if kind == "linear":
        return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH)), "^0$", "0.weight"
    if kind == "conv1d":
        return nn.Sequential(Named(3 * WIDTH, WIDTH)), "^0$", "0.weight"
    attention = nn.ModuleDict({"attn": nn.MultiheadAttention(WIDTH, HEADS)})
    return attention, "attn$", "attn.in_proj_weight"


def directions(
    model: nn.Module, method: Any, gradients: list[list[Tensor]], **settings: Any
) -> Any:
    """What each step makes of the gradients of some parameters."""
    chosen = [model.get_parameter(name) for name in settings.pop("names")]
    found = []
    with closing(stages.preconditioner(model, method, auxiliary="sgd", **settings)) as own:
        for step in gradients:
            for parameter, gradient in zip(chosen, step, strict=True):
                parameter.grad = gradient.clone()
            own.step()
            found.append([parameter.grad.clone() for parameter in chosen])
    return found


@pytest.mark.parametrize("layers", ["all", None])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "attention"])
@pytest.mark.parametrize("parts", [3, 3 * HEADS])
@pytest.mark.parametrize(
    "method",
    [
        Muon(dtype="float64"),
        NorMuon(),
        Chain((SOAP(), "match-rms")),
        Shampoo(sides="left", graft=None),
    ],
    ids=lambda method: type(method).__name__,
)
@pytest.mark.covering(together=2)
def test_parts_are_matrices(kind: str, parts: int, method: Any, layers: Any) -> None:
    """Each as the weight of a layer of its own."""
    model, pattern, name = qkv(kind)
    model.double()
    rows = 3 * WIDTH // parts
    apart = nn.ModuleList([nn.Linear(WIDTH, rows, bias=False) for _ in range(parts + 1)]).double()
    steps = [randn(3 * WIDTH, WIDTH, seed=step) for step in range(4)]
    flipped = kind == "conv1d"
    given = [[g.T if flipped else g] for g in steps]
    settings = {"solve_every": 2, "names": [name], "layers": layers, "cut": {pattern: parts}}
    if kind == "linear" or flipped:  # else it is the last linear layer, the head
        model.append(nn.Linear(2, 2).double())
    found = directions(model, method, given, **settings)
    names = [f"{number}.weight" for number in range(parts)]
    each = [list(g.split(rows)) for g in steps]
    expected = directions(apart, method, each, solve_every=2, names=names)
    for step, ((one,), others) in enumerate(zip(found, expected, strict=True)):
        compare(one.T if flipped else one, torch.cat(others), f"step {step}", rtol=1e-8)


@pytest.mark.parametrize("sizes", [(8, 2, 2), (2, 8, 2), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize(
    "method",
    [Muon(dtype="float64"), NorMuon(), Chain((SOAP(), "match-rms")), Shampoo(sides="left")],
    ids=lambda method: type(method).__name__,
)
def test_parts_of_other_sizes_are_matrices(kind: str, sizes: Any, method: Any) -> None:
    """Queries of all heads, keys and values of fewer: each as the weight of a layer of its own."""
    model, pattern, name = qkv(kind)
    model.append(nn.Linear(2, 2))
    model.double()
    apart = nn.ModuleList([nn.Linear(WIDTH, size, bias=False) for size in (*sizes, 2)]).double()
    steps = [randn(3 * WIDTH, WIDTH, seed=step) for step in range(4)]
    flipped = kind == "conv1d"
    given = [[g.T if flipped else g] for g in steps]
    settings = {"solve_every": 2, "names": [name], "cut": {pattern: list(sizes)}}
    found = directions(model, method, given, **settings)
    names = [f"{number}.weight" for number in range(len(sizes))]
    each = [list(g.split(sizes)) for g in steps]
    expected = directions(apart, method, each, solve_every=2, names=names)
    for step, ((one,), others) in enumerate(zip(found, expected, strict=True)):
        compare(one.T if flipped else one, torch.cat(others), f"step {step}", rtol=1e-8)


class Attention(nn.Module):
    """The modules and attributes of a fused attention, under a class of any name."""

    def __init__(self, child: str, out: int) -> None:
        super().__init__()
        self.num_key_value_heads, self.head_dim, self.split_size = 1, 2, 4
        setattr(self, child, nn.Linear(4, out, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x


def known(path: str, child: str, out: int = 12, base: type = Attention) -> nn.Module:
    """A model with one attention of a class of this qualified name, and a head."""
    module, _, name = path.rpartition(".")
    return nn.Sequential(type(name, (base,), {"__module__": module})(child, out), nn.Linear(4, 2))


class Elsewhere(known("timm.layers.attention.Attention", "qkv")[0].__class__):  # type: ignore[misc]
    """A subclass that splits its projection in another way."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0)


HF = "transformers.models."
THREE, TWO = "[4, 4, 4], as", "[6, 6], as"
KNOWN = {
    f"{HF}openai.modeling_openai.Attention": ("c_attn", THREE),
    f"{HF}dbrx.modeling_dbrx.DbrxAttention": ("Wqkv", "[8, 2, 2], as"),
    f"{HF}mpt.modeling_mpt.MptAttention": ("Wqkv", THREE),
    f"{HF}modernbert.modeling_modernbert.ModernBertAttention": ("Wqkv", THREE),
    f"{HF}qwen2_vl.modeling_qwen2_vl.VisionAttention": ("qkv", THREE),
    f"{HF}qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention": ("qkv", THREE),
    f"{HF}glm.modeling_glm.GlmMLP": ("gate_up_proj", TWO),
    f"{HF}glm4.modeling_glm4.Glm4MLP": ("gate_up_proj", TWO),
    "timm.models.swin_transformer.WindowAttention": ("qkv", THREE),
    "timm.models.beit.Attention": ("qkv", THREE),
    "timm.models.eva.EvaAttention": ("qkv", THREE),
}


@pytest.mark.parametrize("path", KNOWN)
def test_projections_of_further_libraries_are_cut(path: str) -> None:
    child, note = KNOWN[path]
    with closing(stages.preconditioner(known(path, child), "soap-muon")) as own:
        (found,) = (row.note for row in own.report() if row.block)
    assert note in found


@pytest.mark.parametrize(
    ("model", "shape", "note"),
    [
        (known("timm.layers.attention.Attention", "qkv"), (3, 4, 4), "[4, 4, 4], as Attention"),
        (known(f"{HF}gpt2.modeling_gpt2.GPT2Attention", "c_attn", 8), (2, 4, 4), "[4, 4], as GPT2"),
        (known(f"{HF}phi3.modeling_phi3.Phi3Attention", "qkv_proj"), (1, 12, 4), "[8, 2, 2], as"),
        (known(f"{HF}phi3.modeling_phi3.Phi3MLP", "gate_up_proj"), (2, 6, 4), "[6, 6], as Phi3MLP"),
        (known(f"{HF}phi3.modeling_phi3.Phi3Attention", "qkv_proj", 4), (1, 4, 4), ""),
        (
            known(f"{HF}gpt_neox.modeling_gpt_neox.GPTNeoXAttention", "query_key_value"),
            (1, 12, 4),
            "",
        ),
        (known("home.made.Attention", "qkv"), (1, 12, 4), ""),
        (nn.Sequential(Elsewhere("qkv", 12), nn.Linear(4, 2)), (1, 12, 4), ""),
    ],
)
def test_known_projections_are_cut_by_methods_that_orthogonalise(
    model: nn.Module, shape: tuple[int, ...], note: str
) -> None:
    with closing(stages.preconditioner(model, "soap-muon")) as own:
        (block,) = own.blocks
        (found,) = (row.note for row in own.report() if row.block)
    assert tuple(block.shape) == shape
    assert note in found
    assert note or "cut" not in found
    with closing(stages.preconditioner(model, "soap")) as own:
        assert "cut" not in str(own.report())


def test_the_projections_of_attention_by_default_and_whole_if_asked() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 2))
    for settings, shape in (({}, (3, 4, 4)), ({"cut": {"^0$": 1}}, (1, 12, 4))):
        with closing(stages.preconditioner(model, "muon", **settings)) as own:
            assert tuple(own.blocks[0].shape) == shape


def test_the_rest_of_a_module_stays_whole() -> None:
    model, pattern, _ = qkv("attention")
    with closing(stages.preconditioner(model, "sgd", cut={pattern: 6})) as own:
        shapes = {block.name: tuple(block.shape) for block in own.blocks}
        notes = {row.parameter: row.note for row in own.report()}
    assert shapes == {
        "attn.in_proj_weight": (6, 2, 4),
        "attn.in_proj_bias": (1, 12, 1),
        "attn.out_proj.weight": (1, 4, 4),
        "attn.out_proj.bias": (1, 4, 1),
    }
    assert notes["attn.in_proj_weight"] == "cut into 6"


def test_what_is_stored_with_its_inputs_first_has_its_outputs_first() -> None:
    """A square one too; so Muon scales what GPT-2 stores as it scales linear layers."""
    model = nn.Sequential(Named(8, 4), Named(4, 4), nn.ConvTranspose1d(2, 4, 3), nn.Linear(4, 4))
    with closing(stages.preconditioner(model, Chain(("momentum", "match-rms")))) as own:
        shapes = {block.name: tuple(block.shape) for block in own.blocks}
        by_name = {block.name: block for block in own.blocks}
        model[1].weight.grad = randn(4, 4).float()
        packed = by_name["1.weight"].gradient()
    assert shapes["0.weight"] == (1, 8, 4)
    assert shapes["2.weight"] == (1, 4, 6)
    assert torch.equal(packed[0], model[1].weight.grad.T)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "cut"),
    [
        ("muon", {"^(first|twice)$": 2}),
        (Shampoo(epsilon=0.1, graft_steps=0), {"^first$": (4, 2), "^twice$": (3, 1)}),
    ],
    ids=str,
)
def test_ranks_and_micro_batches(method: Any, cut: Any) -> None:
    """Parts are as matrices are: micro-batches, instances, resumption, two ranks.

    Not for bases: those of factors of parts are not unique here, where the rank is that of a part.
    """
    options = {"cut": cut, "ranks": (2,), "launch": run_ranks}
    check_method(method, strategies=("mem-opt", Sharded(group=None)), **options)


def test_a_constraint_keeps_the_norm_of_each_part() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 2))
    before = model[0].weight.detach().unflatten(0, (6, 2)).flatten(1).norm(dim=1)
    optimizer = soframe.Optimizer(
        model,
        "muon",
        lr=0.1,
        statistics=soframe.Statistics(cut={"^0$": 6}),
        constraint="hyperball",
        kl_clip=None,
    )
    kit.train(
        model, lambda net, n: net(randn(5, 4, seed=n).float()).square().sum(), range(3), optimizer
    )
    optimizer.close()
    after = model[0].weight.detach().unflatten(0, (6, 2)).flatten(1).norm(dim=1)
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    ("cut", "error", "message"),
    [
        ({"^0$": 5}, ValueError, r"0.weight: cut\['\^0\$'\]=5: 12 outputs do not divide into 5"),
        ({"^0$": 0}, ValueError, "at least 1"),
        ({"^0$": 1.5}, ValueError, "integer"),
        ({"^0$": "heads"}, ValueError, "integer"),
        ({"^0$": [8, 2]}, ValueError, "they add up to 10, and it has 12 outputs"),
        ({"^0$": [12, 0]}, ValueError, "at least 1"),
        ({"(": 3}, ValueError, "no regular expression"),
        ({3: 3}, TypeError, "must be string or compiled pattern"),
        (3, TypeError, "mapping from patterns"),
    ],
    ids=str,
)
def test_what_cannot_be_cut(cut: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stages.preconditioner(nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 2)), "sgd", cut=cut)


def test_groups_are_cut_alike() -> None:
    layout = CutLayout(PlainLayout(nn.Linear(3, 6), "weight"), 3)
    assert CutLayout(layout, 6).shape == (6, 1, 3)
    with pytest.raises(ValueError, match="3 groups of 2 outputs do not divide into 4"):
        CutLayout(layout, 4)


def test_methods_that_read_calls_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 2))
    with pytest.raises(ValueError, match=r"0: cut\['\^0\$'\] is for methods that read gradients"):
        stages.preconditioner(model, "kfac", cut={"^0$": 3})
    attention, pattern, _ = qkv("attention")
    with pytest.raises(ValueError, match="in_proj_weight: cut"):
        stages.preconditioner(attention, "kfac", layers="all", cut={pattern: 3})
    mixed = {"^0$": "muon", "": "kfac"}
    with closing(stages.preconditioner(model, mixed, cut={"^0$": 3})) as own:
        assert {b.name: b.shape.groups for b in own.blocks} == {"1": 1, "0.weight": 3}
    with pytest.warns(UserWarning, match="no module matches the pattern"):
        stages.preconditioner(model, "sgd", cut={"c_attn": 3}).close()
