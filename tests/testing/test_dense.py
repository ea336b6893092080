"""The dense Fisher against formulas derived by hand, torch.func and finite differences."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.testing import compare, dense_fisher, sample_gradients
from soframe.testing.dense import Kind
from tests.examples import examples


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """A layer whose flat vector is already row-major ``[out, in]`` unless it has a bias."""
    layer = nn.Linear(inputs, outputs, bias=bias).double()
    for k, parameter in enumerate(layer.parameters()):
        parameter.data = randn(*parameter.shape, seed=100 + k)
    return layer


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * ((output - target) ** 2).flatten(1).sum(1).mean()


sizes = st.integers(1, 5)


@given(n=sizes, inputs=sizes, outputs=sizes)
@settings(max_examples=examples(15), deadline=None)
def test_regression_type2_is_identity_kron_second_moment(n: int, inputs: int, outputs: int) -> None:
    x, y = randn(n, inputs), randn(n, outputs, seed=1)
    moment = sum((torch.outer(r, r) for r in x), torch.zeros(inputs, inputs).double()) / n
    eye = torch.eye(outputs, dtype=torch.float64)
    model = linear(inputs, outputs, bias=False)
    # 0.5 ||f - y||^2 has Hessian I in f; torch's MSELoss divides ||f - y||^2 by K: 2 I / K.
    compare(dense_fisher(model, x, half_square, y, kind="type-2"), torch.kron(eye, moment), "half")
    mse = dense_fisher(model, x, nn.MSELoss(), y, kind="type-2")
    compare(mse, torch.kron(2 / outputs * eye, moment), "mse")
    summed = nn.MSELoss(reduction="sum")
    total = dense_fisher(model, x, summed, y, kind="type-2", reduction="sum")
    compare(total, torch.kron(2 * eye, n * moment), "sum")


@given(n=sizes, inputs=sizes, outputs=sizes)
@settings(max_examples=examples(15), deadline=None)
def test_regression_empirical_is_residuals_squared(n: int, inputs: int, outputs: int) -> None:
    x, y = randn(n, inputs), randn(n, outputs, seed=1)
    model = linear(inputs, outputs, bias=False)
    expected = torch.zeros(outputs * inputs, outputs * inputs, dtype=torch.float64)
    rows = []
    for x_n, y_n in zip(x, y, strict=True):
        residual = model.weight.detach() @ x_n - y_n
        rows.append(torch.outer(residual, x_n).flatten())
        expected += torch.kron(torch.outer(residual, residual), torch.outer(x_n, x_n)) / n
    compare(dense_fisher(model, x, half_square, y), expected, "empirical")
    compare(sample_gradients(model, x, half_square, y), torch.stack(rows), "gradients")


@pytest.mark.parametrize("n", [1, 4])
def test_softmax_hessian_is_diag_p_minus_ppt(n: int) -> None:
    x, y = randn(n, 3), torch.arange(n) % 4
    model = linear(3, 4, bias=False)
    exact, empirical = torch.zeros(2, 12, 12, dtype=torch.float64)
    for x_n, y_n in zip(x, y, strict=True):
        p = (model.weight.detach() @ x_n).softmax(0)
        residual = p - F.one_hot(y_n, 4)
        exact += torch.kron(p.diag() - torch.outer(p, p), torch.outer(x_n, x_n)) / n
        empirical += torch.kron(torch.outer(residual, residual), torch.outer(x_n, x_n)) / n
    loss = nn.CrossEntropyLoss()
    compare(dense_fisher(model, x, loss, y, kind="type-2"), exact, "type-2")
    compare(dense_fisher(model, x, loss, y, kind="empirical"), empirical, "empirical")


def test_logistic_regression_with_bias() -> None:
    x, y = randn(5, 3), (torch.arange(5) % 2).double()[:, None]
    model = linear(3, 1)  # one output: the flat [weight, bias] is [x, 1]
    p = model(x).sigmoid().detach()
    expected = (with_one(x) * p * (1 - p)).T @ with_one(x) / 5
    compare(dense_fisher(model, x, nn.BCEWithLogitsLoss(), y, kind="type-2"), expected, "logistic")


def test_linear_model_type2_is_the_hessian_of_the_loss() -> None:
    x, y = randn(4, 2, 3), torch.tensor([[0, 1], [2, 0], [1, 1], [3, 2]])
    model = linear(3, 4)

    def loss(output: Tensor, target: Tensor) -> Tensor:  # [N, T, C]: positions summed
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / len(
            output
        )

    def of_flat(flat: Tensor) -> Tensor:
        return loss(x @ flat[:12].reshape(4, 3).T + flat[12:], y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    hessian = torch.func.jacrev(torch.func.jacrev(of_flat))(flat)
    compare(dense_fisher(model, x, loss, y, kind="type-2"), hessian, "Hessian")


@pytest.mark.parametrize("kind", ["empirical", "type-2"])
def test_positions_belong_to_their_sample(kind: Kind) -> None:
    """[N, T, C]: a sample's gradient is the sum over its positions, before the outer product."""
    x, y = randn(3, 2, 3), randn(3, 2, 4, seed=1)
    model = linear(3, 4, bias=False)
    expected = torch.zeros(12, 12, dtype=torch.float64)
    for n in range(3):
        residual = x[n] @ model.weight.detach().T - y[n]
        if kind == "empirical":
            gradient = (residual.T @ x[n]).flatten()
            expected += torch.outer(gradient, gradient) / 3
        else:
            for t in range(2):
                eye = torch.eye(4, dtype=torch.float64)
                expected += torch.kron(eye, torch.outer(x[n, t], x[n, t])) / 3
    compare(dense_fisher(model, x, half_square, y, kind=kind), expected, kind)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    ).double()


def finite_difference(function: Callable[[], Tensor], model: nn.Module) -> Tensor:
    """Central differences of a vector in every parameter: ``[K, P]``."""
    columns = []
    step = 1e-6
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.data.view(-1)
            for k in range(flat.numel()):
                value = flat[k].item()
                flat[k] = value + step
                up = function()
                flat[k] = value - step
                columns.append((up - function()) / (2 * step))
                flat[k] = value
    return torch.stack(columns, 1)


def test_against_finite_differences() -> None:
    model, x, y = network(), randn(3, 2, 3, 3), torch.tensor([0, 2, 1])

    def losses() -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    gradients = finite_difference(losses, model)
    compare(sample_gradients(model, x, nn.CrossEntropyLoss(), y), gradients, "rows", rtol=1e-7)
    empirical = dense_fisher(model, x, nn.CrossEntropyLoss(), y)
    compare(empirical, gradients.T @ gradients / 3, "empirical", rtol=1e-7)

    ggn = torch.zeros_like(empirical)
    for n in range(3):
        jacobian = finite_difference(lambda n=n: model(x[n : n + 1])[0], model)  # type: ignore[misc]
        p = model(x[n : n + 1])[0].softmax(0).detach()
        ggn += jacobian.T @ (p.diag() - torch.outer(p, p)) @ jacobian / 3
    type2 = dense_fisher(model, x, nn.CrossEntropyLoss(), y, kind="type-2")
    compare(type2, ggn, "type-2", rtol=1e-7)


@pytest.mark.parametrize("kind", ["empirical", "type-2"])
def test_parameters_choose_and_order_the_block(kind: Kind) -> None:
    model, x, y = network(), randn(3, 2, 3, 3), torch.tensor([0, 2, 1])
    full = dense_fisher(model, x, nn.CrossEntropyLoss(), y, kind=kind)
    start = {}
    offset = 0
    for name, parameter in model.named_parameters():
        start[name] = torch.arange(offset, offset + parameter.numel())
        offset += parameter.numel()
    names = ["3.bias", "0.weight"]
    order = torch.cat([start[name] for name in names])
    part = dense_fisher(model, x, nn.CrossEntropyLoss(), y, parameters=names, kind=kind)
    compare(part, full[order][:, order], "part")

    for name in ("0.bias", "3.weight"):
        model.get_parameter(name).requires_grad_(False)
    trainable = torch.cat([start["0.weight"], start["3.bias"]])
    frozen = dense_fisher(model, x, nn.CrossEntropyLoss(), y, kind=kind)
    compare(frozen, full[trainable][:, trainable], "frozen")


def test_tied_weight_sums_both_uses_and_answers_to_both_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(2, 2, bias=False), linear(2, 2, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))  # type: ignore[no-any-return]

    model, x, y = Tied(), randn(3, 2), randn(3, 2, seed=1)
    w = model.first.weight.detach()
    rows = []
    for x_n, y_n in zip(x, y, strict=True):
        residual = w @ w @ x_n - y_n
        rows.append((torch.outer(residual, w @ x_n) + torch.outer(w.T @ residual, x_n)).flatten())
    expected = torch.stack(rows).T @ torch.stack(rows) / 3
    for names in (None, ["first.weight"], ["second.weight"]):
        compare(dense_fisher(model, x, half_square, y, parameters=names), expected, f"{names}")
    with pytest.raises(ValueError, match="twice"):
        dense_fisher(model, x, half_square, y, parameters=["first.weight", "second.weight"])


class Counting(nn.Linear):
    """Counts its calls in a buffer, in place."""

    calls: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_model_is_left_as_it_was_and_hooks_do_not_fire() -> None:
    model = nn.Sequential(Counting(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[1].eval()
    fired: list[str] = []
    model[0].register_forward_pre_hook(lambda *_: fired.append("pre"))
    model[2].register_forward_hook(lambda *_: fired.append("post"))
    model[2].register_full_backward_hook(lambda *_: fired.append("backward"))
    model[0].weight.grad = torch.ones(3, 2)
    before = copy.deepcopy(model.state_dict())
    block = dense_fisher(model, randn(4, 2).float(), nn.MSELoss(), randn(4, 1).float())
    assert block.dtype == torch.float64
    assert block.shape == (19, 19)
    assert fired == []
    for key, value in model.state_dict().items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])
    assert torch.equal(model[0].weight.grad, torch.ones(3, 2))
    assert model[0].training
    model(randn(4, 2).float()).sum().backward()
    assert fired == ["pre", "post", "backward"]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_hooks_of_torch_that_make_weights_stay() -> None:
    model = nn.utils.weight_norm(nn.Linear(3, 2, bias=False))
    rows = sample_gradients(model, randn(2, 3), nn.MSELoss(), randn(2, 2))
    assert (rows[:, :2] != 0).all()
    assert (rows[:, 2:] != 0).all()


def test_unused_parameters_have_zero_rows_and_structured_inputs_work() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = linear(2, 1), linear(2, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.used(a) * b  # type: ignore[no-any-return]

    model, a, b = Two(), randn(3, 2), randn(3, 1, seed=1)

    def energy(output: Tensor) -> Tensor:
        return (output**2).sum() / len(output)

    by_tuple = dense_fisher(model, (a, b), energy, kind="type-2")
    by_name = dense_fisher(model, {"b": b, "a": a}, energy, kind="type-2")
    features = with_one(a) * b
    expected = torch.zeros(6, 6, dtype=torch.float64)
    expected[:3, :3] = 2 * features.T @ features / 3
    compare(by_tuple, expected, "tuple")
    compare(by_name, expected, "mapping")


def test_loss_that_is_not_the_declared_reduction_is_refused() -> None:
    model, x, y = linear(3, 2), randn(4, 3), torch.tensor([0, 1, 0, 0])
    with pytest.raises(ValueError, match="sum of its samples"):
        dense_fisher(model, x, nn.CrossEntropyLoss(), y, reduction="sum")
    with pytest.raises(ValueError, match="mean of its samples"):
        dense_fisher(model, x, nn.CrossEntropyLoss(reduction="sum"), y)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    with pytest.raises(ValueError, match="weighted mean"):
        dense_fisher(model, x, weighted, y)
    with pytest.raises(ValueError, match="one element"):
        dense_fisher(model, x, lambda output: output)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="dropout"):
        dense_fisher(nn.Sequential(model, nn.Dropout(0.5)), x, nn.CrossEntropyLoss(), y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters": ["weight", "weight"]}, "twice"),
        ({"targets": randn(3, 2)}, "sample axis"),
    ],
)
def test_wrong_arguments(options: dict[str, object], message: str) -> None:
    model = linear(3, 2)
    model.bias.requires_grad_(False)
    arguments: dict[str, object] = {"targets": randn(4, 2)} | options
    with pytest.raises(ValueError, match=message):
        dense_fisher(model, randn(4, 3), half_square, **arguments)  # type: ignore[arg-type]
