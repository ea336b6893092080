"""Kinds of layers with a dense curvature: Kronecker products written out by Jacobians, in float64.

The rows of a layer's inputs are derivatives of its outputs: of ``y_o = W_o a + b_o`` the derivative
in ``W_o`` is ``a``, for every layer that is linear in its weight. Layers inside a function, such as
the projections of attention, come from a *twin*: the same computation of plain linear layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from soframe.layers import ExpertsHelper, LanguageModelRMSNormHelper, TransposedLinearHelper
from tests.curvature import fill, randn

Batch = tuple[Any, Tensor]
Vector = Mapping[str, Tensor]
SIZES = (5, 5, 3)
"""The samples of the batches; the last is smaller."""


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Half the squared error, summed over the entries of a sample; the mean over samples."""
    inputs, targets = batch
    outputs = model(inputs)
    return outputs, (outputs - targets).square().flatten(1).sum(1).mean() / 2


@dataclass(frozen=True)
class Part:
    """A block, or some of its groups, as a layer of the twin.

    Attributes:
        module: The name of the layer in the twin.
        take: From a vector the gradient matrix ``[groups, out, in]``, with the bias as last column.
        rows: From the layer's weight the matrix ``[groups, out, in]``.
        channel: The dimension of outputs that has the features.
    """

    module: str
    take: Callable[[Vector], Tensor]
    rows: Callable[[Tensor], Tensor] = lambda weight: weight.flatten(1).unsqueeze(0)
    channel: int = 1


@dataclass(frozen=True)
class Kind:
    """A model of one kind of layers.

    Attributes:
        model: The model, in eval mode.
        inputs: Makes inputs of so many samples.
        parts: Its blocks.
        twin: The same computation of plain layers; the model itself by default.
        layers: The choice of helpers.
    """

    model: nn.Module
    inputs: Callable[[int], Any]
    parts: Sequence[Part] = ()
    twin: nn.Module | None = None
    layers: Any = "all"
    dense: Callable[[Kind, Sequence[Batch]], list[Tensor]] | None = field(default=None)

    def data(self) -> list[Batch]:
        """Return batches with targets of the outputs' shape."""
        batches = []
        for number, size in enumerate(SIZES):
            inputs = self.inputs(size + 10 * number)[-size:]
            with torch.no_grad():
                targets = randn(*self.model(inputs).shape, seed=100 + number)
            batches.append((inputs, targets))
        return batches

    def matrices(self, data: Sequence[Batch]) -> list[Tensor]:
        """Return the dense curvature ``[groups, out * in, out * in]`` of each part."""
        if self.dense is not None:
            return self.dense(self, data)
        found = []
        for part in self.parts:
            inputs, gradients = rows_of(self, part, data)
            samples = sum(len(targets) for _, targets in data)
            # [groups, in, in] and [groups, out, out]
            left = torch.einsum("gri,grj->gij", inputs, inputs) / samples
            right = torch.einsum("gri,grj->gij", gradients, gradients) / gradients.shape[1]
            pairs = zip(right, left, strict=True)
            found.append(torch.stack([torch.kron(g, a) for g, a in pairs]))
        return found

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradient of each sample, ``[samples, *shape]``, one by one."""
        inputs, targets = batch
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        plain = copy.deepcopy(self.model)

        def value(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            outputs = functional_call(plain, weights, (x,))
            return (outputs - y).square().sum() / 2

        pairs = zip(inputs.split(1), targets.split(1), strict=True)
        each = [grad(value)(parameters, x, y) for x, y in pairs]
        return {name: torch.stack([one[name] for one in each]) for name in parameters}


def rows_of(kind: Kind, part: Part, data: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Return the rows of inputs ``[groups, rows, in]`` and of output gradients, of all data."""
    twin = copy.deepcopy(kind.model if kind.twin is None else kind.twin)
    layer = twin.get_submodule(part.module)
    calls: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        calls.append((args[0].detach(), output))

    left, right = [], []
    handle = layer.register_forward_hook(keep)
    for batch in data:
        calls.clear()
        loss(twin, batch)[1].backward()
        handle.remove()  # not in the calls below
        for inputs, output in calls:
            gradient = output.grad
            assert gradient is not None
            rows = _input_rows(layer, part, inputs)
            left.append(rows)
            gradient = gradient.movedim(part.channel % gradient.dim(), -1) * len(batch[1])
            groups = len(rows)
            # [groups, rows, out]
            outputs = gradient.reshape(rows.shape[1], groups, -1).transpose(0, 1)
            padding = getattr(layer, "padding_idx", None)
            if padding is not None:  # has no row
                kept = inputs.flatten() != padding
                left[-1], outputs = rows[:, kept], outputs[:, kept]
            right.append(outputs)
        handle = layer.register_forward_hook(keep)
    handle.remove()
    return torch.cat(left, 1), torch.cat(right, 1)


def _input_rows(layer: nn.Module, part: Part, inputs: Tensor) -> Tensor:
    """Return the rows of a call, ``[groups, rows, in]``, as derivatives of its outputs."""
    weight = layer.get_parameter("weight").detach()

    def call(weight: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight}, (inputs,))

    # [outputs..., *weight]; bags have no rule for more than one at once
    jacobian = jacrev(call, chunk_size=1)(weight).detach()
    dims = jacobian.dim() - weight.dim()
    jacobian = jacobian.movedim(part.channel % dims, dims - 1).flatten(0, dims - 2)
    rows, channels = jacobian.shape[:2]
    # [rows, channels, groups, out, in]
    matrices = torch.vmap(torch.vmap(part.rows))(jacobian)
    groups = matrices.shape[2]
    first = [matrices[:, group * channels // groups, group, 0] for group in range(groups)]
    found = torch.stack(first)
    if getattr(layer, "bias", None) is not None:
        found = torch.cat([found, torch.ones(groups, rows, 1, dtype=found.dtype)], 2)
    return found


def taking(
    weight: str, bias: str | None, rows: Callable[[Tensor], Tensor], part: slice = slice(None)
) -> Callable[[Vector], Tensor]:
    """Return how a vector becomes a matrix: rows of a weight, and of a bias as last column."""

    def take(vector: Vector) -> Tensor:
        matrix = rows(vector[weight][part])
        if bias is None:
            return matrix
        return torch.cat([matrix, vector[bias][part].reshape(*matrix.shape[:2], 1)], 2)

    return take


def one(
    layer: nn.Module,
    inputs: Callable[[int], Any],
    *after: nn.Module,
    rows: Callable[[Tensor], Tensor] = Part.rows,
    channel: int = 1,
    helper: type | None = None,
) -> Kind:
    """Return the kind of a single layer, ``0`` in a Sequential."""
    bias = "0.bias" if getattr(layer, "bias", None) is not None else None
    part = Part("0", taking("0.weight", bias, rows), rows, channel)
    layers = "all" if helper is None else {"0": helper}
    return Kind(fill(nn.Sequential(layer, *after)).eval(), inputs, [part], layers=layers)


def grouped(groups: int) -> Callable[[Tensor], Tensor]:
    """Return the rows of a convolution's weight ``[out, in / groups, ...]``."""
    return lambda weight: weight.reshape(groups, len(weight) // groups, -1)


def transposed(groups: int) -> Callable[[Tensor], Tensor]:
    """Return the rows of a transposed convolution's weight ``[in, out / groups, ...]``."""
    return lambda weight: (
        weight.reshape(groups, len(weight) // groups, *weight.shape[1:]).transpose(1, 2).flatten(2)
    )


def features(weight: Tensor) -> Tensor:
    """Return the rows of a norm's weight: a group for each feature."""
    return weight.reshape(-1, 1, 1)


def across(weight: Tensor) -> Tensor:
    """Return the rows of a table's weight ``[in, out]``."""
    return weight.T.unsqueeze(0)


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Attention(nn.Module):
    """Self-attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return output


class AttentionTwin(nn.Module):
    """The same of four linear layers."""

    def __init__(self, model: Attention) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4).double() for _ in range(4))
        inner = model.inner
        with torch.no_grad():
            pairs = zip(inner.in_proj_weight.split(4), inner.in_proj_bias.split(4), strict=True)
            for layer, (weight, bias) in zip((self.q, self.k, self.v), pairs, strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            self.out.weight.copy_(inner.out_proj.weight)
            self.out.bias.copy_(inner.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        # Two heads of width 2, or as many of them as a plan has left to this rank.
        q, k, v = (f(x).unflatten(2, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = ((q @ k.mT) / 2**0.5).softmax(-1) @ v
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


def attention() -> Kind:
    model = Attention()
    fill(model).eval()
    whole = ("inner.in_proj_weight", "inner.in_proj_bias", Part.rows)
    parts = [
        Part(name, taking(*whole, slice(4 * i, 4 * i + 4)), channel=-1)
        for i, name in enumerate("qkv")
    ]
    out = taking("inner.out_proj.weight", "inner.out_proj.bias", Part.rows)
    parts.append(Part("out", out, channel=-1))
    return Kind(model, lambda n: randn(n, 3, 4, seed=n), parts, AttentionTwin(model))


def projections() -> Kind:
    """Return attention of linear layers; the keys have no bias, as its gradient is zero."""
    model = AttentionTwin(fill(Attention())).eval()
    model.k.register_parameter("bias", None)
    parts = []
    for name in ("q", "k", "v", "out"):
        bias = None if name == "k" else f"{name}.bias"
        parts.append(Part(name, taking(f"{name}.weight", bias, Part.rows), channel=-1))
    return Kind(model, lambda n: randn(n, 3, 4, seed=n), parts)


class Cell(nn.Module):
    """A recurrent cell over a sequence."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = x.new_zeros(len(x), 2)
        if isinstance(self.cell, nn.LSTMCell):
            state = state, state
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class CellTwin(nn.Module):
    """The same of two linear layers, with the gates of `GATES`."""

    def __init__(self, model: Cell) -> None:
        super().__init__()
        self.gates = GATES[type(model.cell)]
        for name in ("ih", "hh"):
            weight = model.cell.get_parameter(f"weight_{name}")
            layer = nn.Linear(weight.shape[1], len(weight)).double()
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(model.cell.get_parameter(f"bias_{name}"))
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(len(x), 2), x.new_zeros(len(x), 2)
        for step in x.unbind(1):
            h, c = self.gates(self.ih(step), self.hh(h), h, c)
        return h


def _of_lstm(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + y).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _of_gru(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    (r, z, new), (of_r, of_z, of_new) = x.chunk(3, 1), y.chunk(3, 1)
    new = (new + (r + of_r).sigmoid() * of_new).tanh()
    z = (z + of_z).sigmoid()
    return z * h + (1 - z) * new, c


def _of_rnn(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return (x + y).tanh(), c


GATES = {nn.LSTMCell: _of_lstm, nn.GRUCell: _of_gru, nn.RNNCell: _of_rnn}
"""The next states ``h`` and ``c``, from the products with the input and with the state."""


def recurrent(cell: type[nn.Module]) -> Kind:
    model = Cell(cell)
    fill(model).eval()
    parts = [
        Part(name, taking(f"cell.weight_{name}", f"cell.bias_{name}", Part.rows), channel=-1)
        for name in ("ih", "hh")
    ]
    return Kind(model, lambda n: randn(n, 3, 3, seed=n), parts, CellTwin(model))


class Reused(nn.Module):
    """A layer that is called twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.layer(x).tanh())
        return output


def reused(width: int = 3) -> Kind:
    model = Reused(width)
    fill(model).eval()
    part = Part("layer", taking("layer.weight", "layer.bias", Part.rows))
    return Kind(model, lambda n: randn(n, width, seed=n), [part])


class Tied(nn.Module):
    """A table that is the weight of the head, too."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, 3)
        self.head = nn.Linear(3, tokens, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.table(x).mean(1).tanh())
        return output


def tied(tokens: int = 5) -> Kind:
    model = Tied(tokens)
    fill(model).eval()
    table = Part("table", lambda vector: vector["table.weight"].T.unsqueeze(0))

    def dense(kind: Kind, data: Sequence[Batch]) -> list[Tensor]:
        """L ⊗ R over their mean trace, of the outer products of all uses (docs/methods.md)."""
        use = Part("table", table.take, across, channel=-1)
        indices, columns = rows_of(kind, use, data)
        inner, outer = rows_of(kind, Part("head", table.take, channel=-1), data)
        samples = sum(len(targets) for _, targets in data)
        # Outer products [in, out] of all uses, of which the table's have the inputs as indices.
        lefts = torch.cat([columns[0], inner[0]])
        rights = torch.cat([indices[0], outer[0]])
        products = torch.einsum("ro,ri->roi", lefts, rights)
        left = torch.einsum("roi,rpi->op", products, products) / samples / tokens
        right = (products.square().sum((0, 1)) / samples / 3).diag()
        mean = left.trace() / 3
        return [torch.kron(left, right).unsqueeze(0) / mean]

    return Kind(model, lambda n: _indices(n, 4, tokens), [table], dense=dense)


def bags() -> Kind:
    kind = one(nn.EmbeddingBag(5, 3), lambda n: _indices(n, 4, 5), rows=across)

    def dense(kind: Kind, data: Sequence[Batch]) -> list[Tensor]:
        """G ⊗ A, in which A is a diagonal, as that of any table is."""
        (inputs,), (gradients,) = rows_of(kind, kind.parts[0], data)
        left = inputs.square().mean(0).diag()
        right = gradients.T @ gradients / len(gradients)
        return [torch.kron(right, left).unsqueeze(0)]

    return replace(kind, dense=dense)


class Kernels(nn.Module):
    """Two matrices, one for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(2, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel.mT


class KernelsHelper(ExpertsHelper):
    """The helper of `Kernels`."""

    parameter = "kernel"


class Routed(nn.Module):
    """Each sample to one of two experts, with rows of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Kernels()

    def forward(self, x: Tensor) -> Tensor:
        expert = (x[:, 0] > 0).long()
        places = torch.arange(len(x)).flip(0)  # not in the order of the batch
        given = x.new_zeros(2, len(x), 3).index_put((expert, places), x)
        output: Tensor = self.experts(given)[expert, places]
        return output


class RoutedTwin(nn.Module):
    """The same of two linear layers."""

    def __init__(self, model: Routed) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(3, 2, bias=False).double() for _ in range(2))
        with torch.no_grad():
            self.first.weight.copy_(model.experts.kernel[0])
            self.second.weight.copy_(model.experts.kernel[1])

    def forward(self, x: Tensor) -> Tensor:
        outputs = x.new_zeros(len(x), 2)
        for number, layer in enumerate((self.first, self.second)):
            rows = ((x[:, 0] > 0) == number).nonzero().flatten()
            outputs = outputs.index_put((rows,), layer(x[rows]))
        return outputs


def experts() -> Kind:
    model = Routed()
    fill(model).eval()
    parts = [
        Part(name, lambda vector, i=i: vector["experts.kernel"][i : i + 1])
        for i, name in enumerate(("first", "second"))
    ]
    layers = {"experts": KernelsHelper}
    return Kind(model, lambda n: randn(n, 3, seed=n), parts, RoutedTwin(model), layers)


class Mixture(nn.Module):
    """Each token to two of three experts, linear layers, by a router of tokens in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(1).topk(2, 1)
        outputs = x.new_zeros(len(tokens), 2)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            weighted = weights[rows, slots].unsqueeze(1) * expert(tokens[rows])
            outputs = outputs.index_add(0, rows, weighted)
        return outputs.view(*x.shape[:2], 2)


def mixture() -> Kind:
    model = Mixture()
    fill(model).eval()
    parts = [
        Part(name, taking(f"{name}.weight", f"{name}.bias", Part.rows))
        for name in ("router", "experts.0", "experts.1", "experts.2")
    ]
    return Kind(model, lambda n: randn(n, 4, 3, seed=n), parts)


def _indices(samples: int, positions: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(samples)
    return torch.randint(size, (samples, positions), generator=generator)


class Transposed(nn.Module):
    """A linear layer with a weight ``[in, out]``, as GPT-2 has in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class LanguageModelNorm(nn.Module):
    """The RMS norm of language models in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(4)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        squares = x.square().mean(-1, keepdim=True)
        return self.weight * x * (squares + self.variance_epsilon).rsqrt()


def _normed(norm: Any) -> nn.Module:
    with torch.no_grad():
        norm.running_mean.copy_(torch.tensor([0.5, -1.0]))
        norm.running_var.copy_(torch.tensor([2.0, 0.5]))
    return norm


def _images(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: randn(n, *shape, seed=n)


KINDS: dict[str, Callable[[], Kind]] = {
    "Linear": lambda: one(nn.Linear(3, 2), _images(3)),
    "Linear, positions": lambda: one(nn.Linear(3, 2), _images(4, 3), channel=-1),
    "Linear, no bias": lambda: one(nn.Linear(3, 4, bias=False), _images(3)),
    "Linear, transposed": lambda: one(
        Transposed(), _images(3), rows=across, helper=TransposedLinearHelper
    ),
    "Conv1d": lambda: one(nn.Conv1d(2, 3, 2), _images(2, 4)),
    "Conv2d": lambda: one(nn.Conv2d(2, 3, 2, padding=1), _images(2, 3, 3)),
    "Conv3d": lambda: one(nn.Conv3d(1, 2, 2), _images(1, 3, 3, 2)),
    "Conv2d, grouped": lambda: one(nn.Conv2d(4, 6, 2, groups=2), _images(4, 3, 3), rows=grouped(2)),
    "Conv2d, dilated, strided": lambda: one(
        nn.Conv2d(2, 2, 2, dilation=2, stride=2), _images(2, 5, 5)
    ),
    "Conv1d, circular": lambda: one(
        nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), _images(2, 4)
    ),
    "ConvTranspose2d": lambda: one(
        nn.ConvTranspose2d(2, 3, 2, stride=2), _images(2, 2, 2), rows=transposed(1)
    ),
    "ConvTranspose1d, grouped": lambda: one(
        nn.ConvTranspose1d(4, 4, 2, groups=2), _images(4, 3), rows=transposed(2)
    ),
    "ConvTranspose3d": lambda: one(
        nn.ConvTranspose3d(2, 2, (1, 2, 2)), _images(2, 1, 2, 2), rows=transposed(1)
    ),
    "Embedding": lambda: one(
        nn.Embedding(5, 3),
        lambda n: _indices(n, 4, 5),
        Mean(),
        rows=across,
        channel=-1,
    ),
    "Embedding, padding": lambda: one(
        nn.Embedding(5, 3, padding_idx=0),
        lambda n: _indices(n, 4, 5),
        Mean(),
        rows=across,
        channel=-1,
    ),
    "EmbeddingBag": bags,
    "LayerNorm": lambda: one(nn.LayerNorm(4), _images(3, 4), rows=features, channel=-1),
    "RMSNorm": lambda: one(nn.RMSNorm(4), _images(4), rows=features, channel=-1),
    "GroupNorm": lambda: one(nn.GroupNorm(2, 4), _images(4, 3), rows=features),
    "RMSNorm of a language model": lambda: one(
        LanguageModelNorm(),
        _images(3, 4),
        rows=features,
        channel=-1,
        helper=LanguageModelRMSNormHelper,
    ),
    "InstanceNorm1d": lambda: one(nn.InstanceNorm1d(2, affine=True), _images(2, 4), rows=features),
    "InstanceNorm2d, eval": lambda: one(
        _normed(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)),
        _images(2, 2, 2),
        rows=features,
    ),
    "BatchNorm1d, eval": lambda: one(_normed(nn.BatchNorm1d(2)), _images(2), rows=features),
    "BatchNorm2d, eval": lambda: one(_normed(nn.BatchNorm2d(2)), _images(2, 2, 3), rows=features),
    "MultiheadAttention": attention,
    "LSTMCell": lambda: recurrent(nn.LSTMCell),
    "GRUCell": lambda: recurrent(nn.GRUCell),
    "RNNCell": lambda: recurrent(nn.RNNCell),
    "a layer called twice": reused,
    "table and head tied": tied,
    "experts": experts,
    "experts as layers": mixture,
}
