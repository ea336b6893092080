"""Scales and shifts of normalisations: the rows are autograd's, the blocks the dense Fisher's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.layers import (
    BatchNormHelper,
    InstanceNormHelper,
    LanguageModelRMSNormHelper,
    LayerNormHelper,
    RMSNormHelper,
)
from soframe.testing import check_layer_helper, compare, dense_fisher
from tests.curvature import (
    Kind,
    blocks,
    closing,
    factors,
    fill,
    gather,
    half_square,
    log_cosh,
    preconditioner,
    randn,
)

CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(4), (5, 4)),
    "layer norm, positions": (lambda: nn.LayerNorm(4, eps=0.1), (5, 2, 3, 4)),
    "layer norm, two dimensions": (lambda: nn.LayerNorm((3, 4)), (5, 2, 3, 4)),
    "layer norm, no bias": (lambda: nn.LayerNorm(4, bias=False), (5, 2, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), (5, 2, 4)),
    "rms norm, two dimensions": (lambda: nn.RMSNorm((3, 4), eps=0.1), (5, 3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4, eps=0.1), (5, 4, 3, 2)),
    "group norm, no positions": (lambda: nn.GroupNorm(2, 4), (5, 4)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(4, affine=True, eps=0.1), (5, 4, 3)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(4, affine=True), (5, 4, 3, 2)),
    "instance norm 3d, evaluated": (
        lambda: nn.InstanceNorm3d(3, affine=True, track_running_stats=True).eval(),
        (4, 3, 2, 1, 2),
    ),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch norm 1d, positions": (lambda: nn.BatchNorm1d(4, eps=0.1), (5, 4, 3)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), (5, 4, 3, 2)),
    "batch norm 2d, evaluated": (lambda: nn.BatchNorm2d(4).eval(), (5, 4, 3, 2)),
    "batch norm 3d, no statistics kept": (
        lambda: nn.BatchNorm3d(4, track_running_stats=False).eval(),
        (3, 4, 1, 2, 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_autograd(case: str) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    check_layer_helper(fill(make()), 3 * torch.randn(shape) + 1)


def exact_blocks(model: nn.Module, x: Tensor, y: Tensor, loss: Any, kind: Kind) -> Tensor:
    """The dense block of scale and shift of each feature: ``[features, p, p]``."""
    names = [name for name, _ in model.named_parameters()]
    dense = dense_fisher(model, x, loss, y, parameters=names, kind=kind)
    features = model.get_parameter(names[0]).numel()
    order = [[part * features + f for part in range(len(names))] for f in range(features)]
    return torch.stack([dense[each][:, each] for each in order])


PER_SAMPLE = [case for case in CASES if "batch norm" not in case]


@pytest.mark.parametrize("case", PER_SAMPLE)
def test_blocks_are_the_dense_fisher_where_all_outputs_have_a_square_loss(case: str) -> None:
    make, shape = CASES[case]
    model = fill(nn.Sequential(make()))
    x, y = randn(*shape) + 1, randn(*shape, seed=1)
    with closing(preconditioner(model, layers="all")) as own:
        gather(model, [(x, y)], half_square)
        own.step()
        exact = exact_blocks(model, x, y, half_square, "type-2")
        for group, (a, g) in enumerate(zip(*factors(own, "0"), strict=True)):
            compare(torch.kron(g, a), exact[group], f"feature {group}")


@pytest.mark.parametrize("kind", ["type-2", "empirical"])
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(3), lambda: nn.GroupNorm(1, 3)])
def test_blocks_of_one_sample_are_the_dense_fisher_in_any_net(kind: Kind, make: Any) -> None:
    model = fill(nn.Sequential(make(), nn.Tanh(), nn.Linear(3, 2)))
    x, y = randn(1, 3), randn(1, 2, seed=1)
    with closing(preconditioner(model, layers="all")) as own:
        gather(model, [(x, y)], log_cosh, kind)
        own.step()
        model[2].requires_grad_(False)
        names = ["0.weight", "0.bias"]
        dense = dense_fisher(model, x, log_cosh, y, parameters=names, kind=kind)
        for group, (a, g) in enumerate(zip(*factors(own, "0"), strict=True)):
            each = [group, 3 + group]
            compare(torch.kron(g, a), dense[each][:, each], f"feature {group}")


def test_a_batch_norm_takes_the_statistics_of_its_batch_as_given() -> None:
    """The Fisher of the affine map alone, whose inputs a plain formula normalises."""
    model = fill(nn.Sequential(nn.BatchNorm1d(3)))
    x, y = 2 * randn(6, 3) + 1, randn(6, 3, seed=1)
    with closing(preconditioner(model, layers="all")) as own:
        gather(model, [(x, y)], half_square)
        own.step()
        a, g = factors(own, "0")
    normalised = (x - x.mean(0)) / (x.var(0, unbiased=False) + model[0].eps).sqrt()
    for feature in range(3):
        rows = torch.stack([normalised[:, feature], torch.ones(6, dtype=x.dtype)], 1)
        compare(torch.kron(g[feature], a[feature]), rows.T @ rows / 6, f"feature {feature}")


def test_a_batch_norm_remembers_the_mode_of_its_call() -> None:
    model = fill(nn.Sequential(nn.BatchNorm1d(3)))
    model(5 * randn(6, 3, seed=2))
    found = []
    for late in (False, True):
        model.eval()
        with closing(preconditioner(model, layers="all")) as own:
            loss = half_square(model(randn(6, 3)), randn(6, 3, seed=1))
            if late:
                model.train()
            loss.backward()
            own.step()
            found.append(factors(own, "0")[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8)])
def test_short_inputs_are_normalised_as_torch_does_it(make: Any, dtype: torch.dtype) -> None:
    """Small ones too, beside which the number that torch adds is not small."""
    module = make().to(dtype)
    x = (1e-3 * randn(4, 8)).to(dtype)
    helper = (LayerNormHelper if isinstance(module, nn.LayerNorm) else RMSNormHelper)(module)
    rows = helper.input_rows(x)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows[:, :, 0, 0].T, module(x).float(), rtol=0.01, atol=1e-3)


def test_a_layer_norm_leaves_out_rows_that_are_no_data() -> None:
    x, mask = randn(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])
    found = []
    for masked in (True, False):
        model = fill(nn.Sequential(nn.LayerNorm(4)))
        with closing(preconditioner(model, layers="all")) as own:
            if masked:
                own.count(3, rows=mask)
                model(x)[mask].square().sum().backward()
            else:
                own.count(3)
                model(x[mask]).square().sum().backward()
            own.step()
            found.append(factors(own, "0"))
    for masked_one, plain in zip(*found, strict=True):
        compare(masked_one, plain, "padding left out")


@pytest.mark.slow
def test_they_join_where_a_user_asks_for_them() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with closing(preconditioner(model)) as own:
        reasons = {row.parameter: row.reason for row in own.report()}
        assert "layers='all' adds LayerNormHelper" in reasons["1.weight"]
        assert set(blocks(own)) == {"0"}
    for layers in ("all", {"^1$": "all"}, {"^1$": LayerNormHelper}):
        with closing(preconditioner(model, layers=layers)) as own:
            assert set(blocks(own)) == {"0", "1"}


class Scaled(nn.Module):
    """An RMS norm as models of language write it."""

    def __init__(self, features: int, eps: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


Named = type("T5LayerNorm", (Scaled,), {"__module__": "transformers.models.t5.modeling_t5"})


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 3, 4)])
def test_rms_norms_of_language_models_are_found_by_name(shape: tuple[int, ...]) -> None:
    check_layer_helper(fill(Named(4)), randn(*shape))
    assert LanguageModelRMSNormHelper.unsupported(nn.RMSNorm(4)) is not None
    model: Any = nn.Sequential(Named(4), nn.Linear(4, 2), Scaled(2))
    with closing(preconditioner(model, layers="all")) as own:
        assert set(blocks(own)) == {"0", "1"}


def test_an_instance_norm_takes_one_sample_without_a_batch() -> None:
    norm = fill(nn.InstanceNorm1d(3, affine=True))
    helper, x = InstanceNormHelper(norm), randn(3, 5)
    assert torch.equal(helper.input_rows(x), helper.input_rows(x[None]))
    assert helper.output_rows(x).shape == (3, 1, 5, 1)


def test_what_cannot_be_right_is_refused_by_name() -> None:
    reason = BatchNormHelper.unsupported(nn.SyncBatchNorm(3))
    assert reason is not None
    assert "one rank" in reason
    plain = LayerNormHelper.unsupported(nn.LayerNorm(3, elementwise_affine=False))
    assert plain is not None
    assert "not a parameter" in plain


def test_the_running_statistics_are_left_alone() -> None:
    norm = nn.BatchNorm1d(3)
    helper = BatchNormHelper(norm)
    before = norm.running_mean.clone()
    rows = helper.input_rows(torch.randn(4, 3))
    assert torch.equal(norm.running_mean, before)
    assert torch.allclose(rows.mean((1, 2, 3)), torch.zeros(3), atol=1e-6)
