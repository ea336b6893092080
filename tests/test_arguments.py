"""What cannot be meant is refused when a preconditioner is built, by the setting's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.layers import Conv2dHelper, LayerHelper, LinearHelper
from soframe.methods import KFAC
from soframe.solvers import Inverse, Lazy, NewtonSchulz
from soframe.specs import FactorSpec
from soframe.testing import compare
from tests.curvature import blocks, closing, fill, preconditioner, randn

NAN = float("nan")


def build(**options: Any) -> soframe.Preconditioner:
    model = options.pop("model", None)
    model = fill(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))) if model is None else model
    return preconditioner(model, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": 5}, TypeError, "model must be a torch.nn.Module, not 5"),
        ({"model": nn.Linear}, TypeError, "model must be a torch.nn.Module, not <class"),
        (
            {"solve_evry": 3},
            TypeError,
            "Preconditioner has no setting 'solve_evry'; did you mean 'solve_every'.* optimizer, ",
        ),
        ({"lamda": 3}, TypeError, r"no setting 'lamda'\. .*The settings are auxiliary, back"),
        ({"optimizer": 5}, TypeError, "optimizer must be a torch.optim.Optimizer, .* not 5"),
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer must be"),
        ({"dtype": torch.int64}, ValueError, "^dtype must be .* torch.float32 or .* torch.int64"),
        ({"dtype": torch.float16}, ValueError, "^dtype must be .* not torch.float16"),
        ({"dtype": torch.complex64}, ValueError, "^dtype must be .* not torch.complex64"),
        ({"grad_scaler": 5}, TypeError, "grad_scaler must be .* not 5"),
        ({"grad_scaler": torch.amp.GradScaler}, TypeError, "grad_scaler must be"),
        ({"skip": ["("]}, ValueError, r"skip: the pattern '\(' is no regular expression"),
        ({"skip": "0"}, TypeError, r"pass \['0'\]"),
        ({"layers": {"(": LinearHelper}}, ValueError, "layers: .* no regular expression"),
        ({"method": {"[": "kfac"}}, ValueError, "method: .* no regular expression"),
        ({"solver": {"*": "eigen"}}, ValueError, "solver: .* no regular expression"),
        ({"method": KFAC(max_size=0)}, ValueError, "max_size must be positive, not 0"),
        ({"kl_clip": "x"}, ValueError, "kl_clip must be a number"),
        ({"damping": 10**400}, ValueError, "damping must be a number"),
        ({"decay": 1j}, ValueError, "decay must be a number"),
        ({"scaling": torch.ones(2)}, ValueError, "scaling must be one of"),
        ({"loss_average": np.ones(2)}, ValueError, "loss_average must be one of"),
        ({"gradients": ["local"]}, ValueError, "gradients must be one of"),
        ({"fisher": ["empirical"]}, ValueError, "fisher must be one of"),
    ],
    ids=str,
)
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(**options)


@pytest.mark.parametrize("owner", [soframe.Preconditioner, soframe.Optimizer])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("fisher", "statistics=soframe.Statistics"),
        ("stagger", "distribution=soframe.Distribution"),
        ("norm_clip", "clips=soframe.Clips"),
    ],
)
def test_a_setting_of_a_group_is_named_with_the_group(owner: Any, name: str, place: str) -> None:
    message = rf"soframe.{owner.__name__} has no setting '{name}': pass {place}\({name}=\.\.\.\)\. "
    with pytest.raises(TypeError, match=message):
        owner(nn.Linear(3, 2), lr=0.1, **{name: None})


def test_an_optimizer_without_rates() -> None:
    class Odd:
        param_groups = ({"params": []},)

    with pytest.raises(ValueError, match=r"\[0\]\['lr'\] is missing or None"):
        build(optimizer=Odd())


def test_an_optimizer_that_keeps_its_rates_to_itself() -> None:
    """As Adafactor of transformers does by default."""
    model = fill(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match=r"\[0\]\['lr'\] is missing or None, as where SGD"):
        build(model=model, optimizer=optimizer)
    build(model=model, lr=0.1)


def test_wrappers_of_optimizers_are_optimizers() -> None:
    class Wrapper:
        """As Lightning's: no subclass."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.param_groups = optimizer.param_groups

    model = fill(nn.Linear(3, 2))
    build(model=model, optimizer=Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None])
@pytest.mark.parametrize("parameters", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes_of_factors(dtype: torch.dtype | None, parameters: torch.dtype) -> None:
    model = fill(nn.Linear(3, 2)).to(parameters)
    with closing(build(model=model, dtype=dtype)) as own:
        model(torch.randn(4, 3, dtype=parameters)).square().mean().backward()
        own.step()
        expected = dtype or torch.promote_types(parameters, torch.float32)
        assert {f.dtype for f in blocks(own)["Linear"].running.values()} == {expected}
    assert all(p.grad.isfinite().all() for p in model.parameters())


ODD_VALUES = [10**400, NAN, float("inf"), -1.0, 1j, torch.ones(()), None, True, "x", [1.0]]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("name", ["damping", "decay", "kl_clip", "norm_clip", "lr"])
def test_schedules_that_return_no_number(name: str, value: Any) -> None:
    """Mid-step, before anything has changed."""
    model = fill(nn.Linear(3, 2))
    options = {"kl_clip": 1e-3, "lr": 0.1} | {name: lambda step: value if step else 0.5}
    with closing(build(model=model, **options)) as own:
        for step in range(2):
            model.zero_grad()
            model(randn(4, 3)).square().mean().backward()
            raw = [p.grad.clone() for p in model.parameters()]
            if step == 0:
                own.step()
                continue
            with pytest.raises(ValueError, match=f"^{name} must be a number in"):
                own.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True))


@pytest.mark.parametrize("value", [0, NAN, 1.5, None, True, "x", torch.ones(2)], ids=str)
@pytest.mark.parametrize("name", ["statistics_every", "solve_every"])
def test_intervals_that_are_none(name: str, value: Any) -> None:
    if value is not None:  # which leaves the interval to the methods
        with pytest.raises(ValueError, match=f"^{name} must be a positive integer"):
            build(**{name: value})
    model = fill(nn.Linear(3, 2))
    model(randn(4, 3)).square().mean().backward()
    with pytest.raises(ValueError, match=f"^{name} must be a positive integer"):
        build(model=model, **{name: lambda step: value}).step()


def test_more_rows_than_a_float_can_hold() -> None:
    model = fill(nn.Conv2d(1, 2, 2))
    with closing(build(model=model, rows=10**400)) as own:
        model(randn(2, 1, 3, 3)).square().mean().backward()
        own.step()


# -- modules and components ----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 0), (0, 4)], ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_without_elements(sizes: tuple[int, int]) -> None:
    module = nn.Linear(*sizes)
    own = build(model=nn.ModuleList([module, nn.Linear(2, 2)]))
    reasons = {row.parameter: row.reason for row in own.report()}
    assert "has parameters without elements: weight" in reasons["0.weight"]
    assert reasons["1.weight"] == ""
    with pytest.raises(ValueError, match="there is nothing to precondition"):
        build(model=module)


def test_a_helper_of_another_layer() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten(), nn.Linear(3, 2))
    reasons = {
        row.parameter: row.reason
        for helper in (LinearHelper, Conv2dHelper)
        for row in build(
            model=model, layers={"0" if helper is LinearHelper else "2": helper}
        ).report()
        if row.reason
    }
    assert "LinearHelper serves matrices, and its weight has 4 dimensions" in reasons["0.weight"]
    assert "Conv2dHelper serves convolutions, not Linear" in reasons["2.weight"]


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel.mT


class AnyNames(LinearHelper):
    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        return None


def test_parameters_of_other_names() -> None:
    model = nn.Sequential(Kernel(), nn.Linear(2, 2))
    message = r"module '0' \(Kernel\) has no parameter 'weight' but kernel, while AnyNames.unsuppo"
    with pytest.raises(ValueError, match=message):
        build(model=model, layers={"0": AnyNames})


def test_a_helper_that_renames_parameters() -> None:
    class Renames(LinearHelper):
        @property
        def parameters(self) -> Mapping[str, nn.Parameter]:
            return {"kernel": self.module.weight}

    with pytest.raises(ValueError, match=r"module '0': Renames.parameters has 'kernel', which is"):
        build(model=nn.Sequential(nn.Linear(2, 2)), layers={"0": Renames})


class Twice(nn.Module):
    """One parameter by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(2, 3))
        self.again = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


def test_a_parameter_by_two_names_is_one() -> None:
    model = Twice()
    with closing(build(model=nn.Sequential(model), layers={"0": AnyNames})) as own:
        x = randn(4, 3)
        model(x).square().mean().backward()
        own.step()
        (block,) = own.blocks
        assert len(block.helpers) == 1
        compare(block.running["A"][0], x.T @ x / 4, "A")


@dataclass(frozen=True)
class Uneven(KFAC):
    """Factors of different groups."""

    def factors(self, shape: Any) -> tuple[FactorSpec, ...]:
        return (FactorSpec("A", "right", 2, 2), FactorSpec("G", "left", 1, shape.out_features))


@pytest.mark.parametrize("solver", [Inverse(), Inverse("sqrt"), NewtonSchulz(), Lazy(Inverse())])
def test_a_solver_that_cannot_share_the_damping(solver: Any) -> None:
    message = r"0: .*Inverse|NewtonSchulz.* cannot solve the factors of .*split='full'"
    with pytest.raises(ValueError, match=message):
        build(method=Uneven(), solver=solver)
    build(method=Uneven(), solver="eigen")
    build(method=Uneven(), solver=Inverse("full"))
    with pytest.raises(ValueError, match="relative damping needs factors of as many groups"):
        build(method=Uneven(), solver="eigen", damping="relative")


@dataclass(frozen=True)
class OneNumber(KFAC):
    """A factor of the inputs that has no column for each of them."""

    def factors(self, shape: Any) -> tuple[FactorSpec, ...]:
        return (FactorSpec("A", "right", 1, 1), FactorSpec("G", "left", 1, shape.out_features))

    def statistics(self, call: Any) -> Any:
        moments = dict(super().statistics(call))
        if "A" in moments:
            moments["A"] = call.helper.input_moment(call.inputs, call.output_rows)[:, :1, :1]
        return moments

    def precondition(self, gradient: Tensor, data: Any, solver: Any, damping: float) -> Tensor:
        columns = gradient.shape[-1]
        right = {"inverse": data["A"]["inverse"] * torch.eye(columns, dtype=gradient.dtype)}
        return solver.apply(gradient, left=data["G"], right=right, damping=damping)


def test_freezing_the_bias_of_other_factors_starts_them_anew() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    with closing(build(model=model, method=OneNumber(), solver="inverse")) as own:
        for step in range(3):
            if step == 1:
                model[0].bias.requires_grad_(False)
            model.zero_grad()
            model(randn(4, 3)).square().mean().backward()
            own.step()
        assert blocks(own)["0"].mass > 0
        assert blocks(own)["0"].running["A"].shape == (1, 1, 1)


def test_the_registered_helper_is_not_recommended() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    model = nn.Sequential(Pair(3, 2))
    own = build(model=model, layers={"0": LinearHelper})
    with closing(own), pytest.raises(TypeError) as raised:
        model[0](torch.randn(2, 3))
    assert "0: LinearHelper serves modules that return one tensor, not tuple" in str(raised.value)
    assert "register a helper" not in str(raised.value)
    assert issubclass(LinearHelper, LayerHelper)
