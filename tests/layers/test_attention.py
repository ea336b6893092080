"""Multi-head attention: its blocks are those of linear layers in place of its projections."""

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.layers import AttentionHelper
from soframe.layers.attention import SEPARATE
from soframe.testing import check_layer_helper, compare, dense_fisher
from tests.curvature import blocks, closing, factors, fill, log_cosh, preconditioner, randn

EMBED, HEADS, BATCH = 4, 2, 3


class Twin(nn.Module):
    """The same attention, of linear layers, batch first."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            self.add_module(name, linear(weight, bias))
        self.o = linear(module.out_proj.weight, module.out_proj.bias)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        q, k, v = self.q(q), self.k(k), self.v(v)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], -math.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


class Model(nn.Module):
    """Attention between layers; with the twin, or without."""

    def __init__(self, attention: nn.Module, features: int = EMBED, **call: Any) -> None:
        super().__init__()
        self.first = fill(nn.Linear(EMBED, EMBED), seed=4)
        self.attention = attention
        self.last = fill(nn.Linear(EMBED, 2), seed=5)
        self.call, self.checkpointed = call, ""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if isinstance(self.attention, Twin):
            return self.attention(q, k, v, self.call.get("key_padding_mask"))
        first = self.attention.batch_first
        if k is q and v is q and not first:
            q = k = v = q.transpose(0, 1)
        elif not first:
            k, v = (k.transpose(0, 1),) * 2 if k is v else (k.transpose(0, 1), v.transpose(0, 1))
            q = q.transpose(0, 1)
        found = self.attention(q, k, v, **self.call)[0]
        return found if first else found.transpose(0, 1)

    def forward(self, x: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        x = self.first(x).tanh()
        k, v = x if k is None else k, x if v is None else v
        if self.checkpointed and not isinstance(self.attention, Twin):
            reentrant = self.checkpointed == "reentrant"
            out = checkpoint(self.attend, x, k, v, use_reentrant=reentrant)
        else:
            out = self.attend(x, k, v)
        return self.last(out.tanh()).tanh()


def packed(twin: dict[str, Any], *names: str) -> tuple[Tensor, Tensor]:
    pairs = [twin[f"attention.{name}"] for name in names]
    return torch.cat([a for a, _ in pairs]), torch.cat([g for _, g in pairs])


def statistics(model: nn.Module, data: list[tuple[Tensor, ...]], fisher: str) -> dict[str, Any]:
    """The running factors after two steps, of two micro-batches each."""
    settings = {"fisher": fisher, "loss": "mse", "layers": "all"}
    with closing(preconditioner(model, **settings)) as own:
        if fisher == "monte-carlo":
            generator = own.curvature.parts.fisher.generator
            generator.manual_seed(0) if generator else torch.manual_seed(0)
        for step in range(2):
            model.zero_grad()
            for number, inputs in enumerate(data):
                # With batch_first=False [N, T] may be [T, N]: it would ask.
                if fisher == "empirical" and not getattr(model.attention, "batch_first", True):
                    own.count(len(inputs[0]))
                output = model(*inputs)
                if fisher != "empirical":
                    own.observe(output)
                target = randn(*output.shape, seed=10 * step + number)
                (F.mse_loss(output, target) / len(data)).backward()
            own.step()
        found = {name: factors(own, name) for name in blocks(own)}
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"factors": found, "grads": grads}


def hold(
    module: nn.MultiheadAttention,
    data: list[tuple[Tensor, ...]],
    fisher: str = "empirical",
    checkpointed: str = "",
    **call: Any,
) -> None:
    """Hold a module's factors and preconditioned gradients to those of its twin."""
    model, twin = Model(module, **call), Model(Twin(module), **call)
    model.checkpointed = checkpointed
    ours, theirs = (statistics(m, data, fisher) for m in (model, twin))
    got, wanted = ours["factors"], theirs["factors"]
    if module.in_proj_weight is not None:
        pairs = {"attention.in_proj_weight": packed(wanted, "q", "k", "v")}
    else:
        pairs = {f"attention.{n}_proj_weight": wanted[f"attention.{n}"] for n in "qkv"}
        bias = None
        if module.in_proj_bias is not None:
            bias = torch.cat([wanted[f"attention.{n}"][1] for n in "qkv"])
        if bias is not None:
            compare(got["attention.in_proj_bias"][1], bias, "G of the biases")
            ones = wanted["attention.q"][0][:, -1:, -1:]
            compare(got["attention.in_proj_bias"][0][:1], ones, "A of the biases")
        weights = {key: (a[:, :-1, :-1], g) for key, (a, g) in pairs.items()}
        pairs = weights if bias is not None else pairs
    pairs["attention.out_proj_weight"] = wanted["attention.o"]
    for name in ("first", "last"):
        pairs[name] = wanted[name]
    extra = {"attention.in_proj_bias"} if module.in_proj_weight is None else set()
    assert set(got) - extra == set(pairs)
    for name, (a, g) in pairs.items():
        compare(got[name][0], a, f"A of {name}", rtol=1e-10)
        compare(got[name][1], g, f"G of {name}", rtol=1e-10)
    out = ours["grads"]["attention.out_proj.weight"]
    compare(out, theirs["grads"]["attention.o.weight"], "direction", rtol=1e-8)
    if module.in_proj_weight is not None:
        each = [theirs["grads"][f"attention.{n}.weight"] for n in "qkv"]
        compare(ours["grads"]["attention.in_proj_weight"], torch.cat(each), "direction", rtol=1e-8)


def attention(seed: int = 0, **settings: Any) -> nn.MultiheadAttention:
    module = fill(nn.MultiheadAttention(EMBED, HEADS, **settings), seed)
    assert isinstance(module, nn.MultiheadAttention)
    return module


SELF = [(randn(BATCH, 5, EMBED),), (randn(BATCH, 5, EMBED, seed=1),)]
MEMORY = [
    (randn(BATCH, 5, EMBED, seed=s), *(randn(BATCH, 6, EMBED, seed=s + 2),) * 2) for s in (0, 1)
]
THREE = [tuple(randn(BATCH, n, EMBED, seed=s + i) for i, n in enumerate((5, 6, 6))) for s in (0, 7)]
FISHERS = ["empirical", "type-2", "monte-carlo"]


# The model transposes what it takes, so that the batch is first: it asks once, without need.
ASKED = pytest.mark.filterwarnings("ignore:soframe. the model shows .*batch_first=False")


@ASKED
@pytest.mark.covering(together=1)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention(fisher: str, batch_first: bool, bias: bool) -> None:
    hold(attention(batch_first=batch_first, bias=bias), SELF, fisher, need_weights=bias)


@ASKED
@pytest.mark.slow
@pytest.mark.covering(together=1)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("data", [MEMORY, THREE], ids=["keys are values", "all differ"])
def test_cross_attention(fisher: str, data: list[tuple[Tensor, ...]]) -> None:
    hold(attention(batch_first=True), data, fisher, need_weights=False)
    hold(attention(), data, fisher)


@pytest.mark.covering(together=1)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("bias", [True, False])
def test_separate_weights(fisher: str, bias: bool) -> None:
    sizes = (EMBED, 3, 5)
    data = [
        tuple(randn(BATCH, n, size, seed=s) for n, size in zip((5, 6, 6), sizes, strict=True))
        for s in (0, 1)
    ]
    hold(attention(kdim=3, vdim=5, batch_first=True, bias=bias), data, fisher)


@pytest.mark.parametrize("settings", [{"method": "foof"}, {"fisher": "forward-only"}], ids=str)
def test_a_common_bias_without_factors_of_outputs(settings: dict[str, Any]) -> None:
    """Its factor counts the positions of queries, keys and values apart."""
    model = attention(kdim=3, vdim=5, batch_first=True)
    with closing(preconditioner(model, layers="all", **settings)) as own:
        inputs = (randn(BATCH, n, size) for n, size in ((5, EMBED), (6, 3), (6, 5)))
        model(*inputs, need_weights=False)[0].square().sum().div(BATCH).backward()
        own.step()
        (bias,) = (block for block in own.blocks if list(block.parameters) == ["in_proj_bias"])
        compare(bias.running["A"], torch.tensor([5.0, 6.0, 6.0]).view(3, 1, 1), "A", rtol=1e-12)


def test_a_mask_of_keys() -> None:
    padding = torch.zeros(BATCH, 5, dtype=torch.bool)
    padding[0, 3:] = padding[1, 4:] = True
    for weights in (True, False):
        hold(attention(batch_first=True), SELF, key_padding_mask=padding, need_weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fisher"),
    [
        ("reentrant", "empirical"),  # torch.autograd.grad does not go through these
        ("anew", "type-2"),
        pytest.param("anew", "empirical", marks=pytest.mark.thorough),
        pytest.param("anew", "monte-carlo", marks=pytest.mark.thorough),
    ],
)
def test_what_a_checkpoint_computes_anew(kind: str, fisher: str) -> None:
    hold(attention(batch_first=True), SELF, fisher, checkpointed=kind)
    hold(attention(batch_first=True), THREE, fisher, checkpointed=kind)


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({"batch_first": True}, [(3, 5, 4)] * 3),
        ({}, [(5, 3, 4)] * 3),
        ({"batch_first": True, "bias": False}, [(3, 5, 4), (3, 6, 4), (3, 6, 4)]),
        ({"batch_first": True, "kdim": 3, "vdim": 5}, [(3, 5, 4), (3, 6, 3), (3, 6, 5)]),
        ({"add_zero_attn": True, "batch_first": True}, [(3, 5, 4)] * 3),
    ],
)
def test_rows_are_those_of_autograd(settings: Any, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    dim = 0 if settings.get("batch_first") else 1
    same = torch.randn(shapes[0])
    inputs = [same if s == shapes[0] else torch.randn(s) for s in shapes]
    module = nn.MultiheadAttention(EMBED, HEADS, **settings)
    for need_weights in (True, False):
        call = {"need_weights": need_weights}
        check_layer_helper(module, *inputs, batch_dim=dim, settings=call)


def test_one_unbatched_sample_of_one_position_is_the_dense_fisher() -> None:
    model = Model(attention(batch_first=True))
    x, y = randn(1, 1, EMBED), randn(1, 1, 2)
    with closing(preconditioner(model, layers="all")) as own:
        log_cosh(model(x), y).backward()
        own.step()
        a, g = factors(own, "attention.in_proj_weight")
    names = ["attention.in_proj_weight", "attention.in_proj_bias"]
    dense = dense_fisher(model, x, log_cosh, y, parameters=names)
    for group in range(3):
        rows = range(group * EMBED, (group + 1) * EMBED)
        order = [
            place
            for o in rows
            for place in (*range(o * EMBED, (o + 1) * EMBED), 3 * EMBED * EMBED + o)
        ]
        compare(torch.kron(g[group], a[group]), dense[order][:, order], f"group {group}")
    with closing(preconditioner(model.attention, layers="all")) as own:
        single = randn(5, EMBED)
        own.count(1)  # the root's own arguments are taken for five samples
        model.attention(single, single, single)[0].square().sum().backward()
        own.step()
        (block,) = (b for b in own.blocks if "in_proj_weight" in b.parameters)
        rows = torch.cat([single, torch.ones(5, 1)], 1)
        compare(block.running["A"][0], rows.T @ rows, "A of one sample without a batch")


@pytest.mark.parametrize("evaluated", [False, True])
def test_in_a_transformer_layer(evaluated: bool) -> None:
    """Its fast path is for inference; who differentiates goes through the modules."""
    layer = fill(nn.TransformerEncoderLayer(EMBED, HEADS, 6, dropout=0.0, batch_first=True))
    twin = copy.deepcopy(layer)
    twin.self_attn = Attend(Twin(layer.self_attn))
    found = []
    for model in (layer, twin):
        model.train(not evaluated)
        if evaluated and model is twin:
            model.train()  # the fast path's conditions read attributes that the twin lacks
        with closing(preconditioner(model, layers="all")) as own:
            model(randn(BATCH, 5, EMBED)).square().sum().backward()
            own.step()
            found.append({name: factors(own, name) for name in blocks(own)})
    ours, theirs = found
    theirs = {name.replace("self_attn.twin", "attention"): pair for name, pair in theirs.items()}
    for mine, wanted in (
        (ours["self_attn.in_proj_weight"], packed(theirs, "q", "k", "v")),
        (ours["self_attn.out_proj_weight"], theirs["attention.o"]),
        (ours["norm1"], theirs["norm1"]),
    ):
        for one, other in zip(mine, wanted, strict=True):
            compare(one, other, "factor", rtol=1e-10)


class Attend(nn.Module):
    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.twin, self.batch_first = twin, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.twin(q, k, v), None


def test_autocast_sees_the_same_rows() -> None:
    module = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    with closing(preconditioner(module, layers="all")) as own:
        x = torch.randn(BATCH, 5, EMBED)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x, x, x, need_weights=False)[0]
        out.float().square().mean().backward()
        own.step()
        a = next(iter(blocks(own).values())).running["A"]
    rows = torch.cat([x, torch.ones(BATCH, 5, 1)], 2).flatten(0, 1)
    torch.testing.assert_close(a[0], rows.T @ rows / BATCH, rtol=0.02, atol=0.02)
    assert a.dtype == torch.float32


class Mark:
    """Lives as long as the node that has it."""


def mark(output: Tensor) -> weakref.ref[Mark]:
    """Return a reference to something that dies with the graph of an output."""
    node = output.grad_fn
    while node.name() not in ("AddmmBackward0", "MmBackward0"):
        node = node.next_functions[0][0]
    one = Mark()
    node.metadata["mark"] = one
    return weakref.ref(one)


@pytest.mark.parametrize("fisher", FISHERS)
def test_nothing_keeps_the_graph(fisher: str) -> None:
    model = Model(attention(batch_first=True))
    with closing(preconditioner(model, layers="all", fisher=fisher, loss="mse")) as own:
        output = model(*SELF[0])
        dead = mark(output)
        if fisher != "empirical":
            own.observe(output)
        output.square().mean().backward()
        own.step()
        del output
        gc.disable()
        try:
            assert dead() is None
        finally:
            gc.enable()
        if fisher == "empirical":
            output = model(*SELF[0])
            dead = mark(output)
            del output  # never differentiated
            assert dead() is None


def test_a_frozen_weight_takes_its_bias_along() -> None:
    module = attention(batch_first=True)
    module.in_proj_weight.requires_grad_(False)
    module.out_proj.bias.requires_grad_(False)
    model = Model(module)
    with closing(preconditioner(model, layers="all")) as own:
        report = {row.parameter: row for row in own.report()}
        assert report["attention.in_proj_weight"].reason == "frozen"
        assert report["attention.in_proj_bias"].reason == "its layer has no block"
        assert set(blocks(own)) == {"first", "attention.out_proj_weight", "last"}
        model(*SELF[0]).square().mean().backward()
        own.step()


@pytest.mark.parametrize("part", [list(SEPARATE), [*SEPARATE, "in_proj_bias"]])
def test_a_common_bias_is_frozen_with_its_weights_or_has_no_block(
    part: list[str],
) -> None:
    model = attention(kdim=3, vdim=5, batch_first=True)
    data = [randn(BATCH, n, size) for n, size in ((5, EMBED), (6, 3), (6, 5))]
    with closing(preconditioner(model, layers="all", statistics_every=1)) as own:
        for step in range(3):
            for name in part:
                model.get_parameter(name).requires_grad_(step == 0)
            model.zero_grad()
            model(*data, need_weights=False)[0].square().mean().backward()
            own.step()
        has_bias = any(list(block.parameters) == ["in_proj_bias"] for block in own.blocks)
        assert has_bias == ("in_proj_bias" in part)


def test_what_cannot_be_right_is_refused_by_name() -> None:
    reason = AttentionHelper.unsupported(nn.MultiheadAttention(4, 2, add_bias_kv=True))
    assert reason is not None
    assert "bias_k" in reason


def test_a_graph_without_the_products_is_an_error() -> None:
    module = attention(batch_first=True)
    helper = AttentionHelper.of(module, ["in_proj_weight"])[0]
    with pytest.raises(RuntimeError, match="compiled"):
        helper.observe((SELF[0][0],), {}, (module.in_proj_weight.sum(), None))


def test_the_default_leaves_it_alone() -> None:
    with closing(soframe.Preconditioner(Model(attention()), kl_clip=None)) as own:
        assert set(blocks(own)) == {"first", "last"}


@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
def test_positions_that_are_no_data_are_left_out(fisher: str) -> None:
    """As they are for linear layers: neither counted, nor in the sums."""
    mask = torch.ones(BATCH, 5, dtype=torch.bool)
    mask[0, 3:] = mask[1, 1:] = False
    found = []
    module = attention(batch_first=True)
    for one in (module, Twin(module)):
        model = Model(one, key_padding_mask=~mask)
        settings = {"layers": "all", "fisher": fisher, "loss": "mse"}
        with closing(preconditioner(model, **settings)) as own:
            own.count(int(mask.sum()), rows=mask)
            output = model(*SELF[0])[mask]
            if fisher != "empirical":
                own.observe(output)
            output.square().mean().backward()
            own.step()
            found.append({name: factors(own, name) for name in blocks(own)})
    ours, theirs = found
    pairs = zip(ours["attention.in_proj_weight"], packed(theirs, "q", "k", "v"), strict=True)
    for one, other in pairs:
        compare(one, other, "factor", rtol=1e-10)


def test_some_rows_stand_for_all() -> None:
    """With every row taken, a sample of them is the whole; with fewer, A has as large a trace."""
    found = []
    for rows in (1.0, 10**6, 7):
        model = Model(attention(batch_first=True))
        with closing(preconditioner(model, layers="all", rows=rows)) as own:
            model(*THREE[0]).square().mean().backward()
            own.step()
            found.append(factors(own, "attention.in_proj_weight"))
    for one, other in zip(found[0], found[1], strict=True):
        assert torch.equal(one, other)
    biases = [a[:, -1, -1] for a, _ in found]
    compare(biases[2], biases[0], "positions, of a bias")


def test_an_empty_batch_enters_no_average() -> None:
    model = Model(attention(batch_first=True))
    found = []
    with closing(preconditioner(model, layers="all", statistics_every=1)) as own:
        for batch in (BATCH, 0):
            x = randn(batch, 2, EMBED)
            model(x, x, x).square().sum().backward()
            own.step()
            found.append([factor.clone() for name in blocks(own) for factor in factors(own, name)])
    for before, after in zip(*found, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("frozen", [("q_proj_weight",), ("k_proj_weight", "v_proj_weight")])
def test_a_projection_that_is_frozen_alone_leaves_the_others_their_statistics(
    frozen: tuple[str, ...],
) -> None:
    """Without the bias's block from then on: its rows are those of all three projections."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True).double()
    with closing(preconditioner(module, layers="all", decay=1e-9)) as own:
        for step in range(3):
            if step == 1:
                for name in frozen:
                    module.get_parameter(name).requires_grad_(False)
            query, key, value = (randn(6, 2, size).double() for size in (4, 3, 5))
            module.zero_grad()
            module(query, key, value)[0].square().sum((1, 2)).mean().backward()
            own.step()
        inputs = {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}
        found = {block.name.rpartition(".")[2]: block for block in own.blocks}
        assert "in_proj_bias" not in found
        for name in inputs.keys() - set(frozen):
            rows = inputs[name].flatten(0, 1)
            compare(found[name].running["A"][0], rows.T @ rows / len(query), name, rtol=1e-7)
