"""A recommended method for a model: a call to paste, its memory, the reason and the page for it.

`ADVICE` has all values, one entry for each kind of model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from soframe.blocks.registration import unwrap
from soframe.methods import SOAP
from soframe.planning import inspection
from soframe.planning.kinds import kind_of
from soframe.registry import KINDS
from soframe.strategies.base import Strategy
from soframe.strategies.placement import complete
from soframe.text import format_bytes


@dataclass(frozen=True)
class Recommendation:
    """The result of `recommend`; print it.

    Attributes:
        kind: The kind of model: ``"transformer"``, ``"convolutional"``, ``"recurrent"``,
            ``"dense"``, ``"regression"`` if a dense net has one output and no table,
            ``"adapters"``, or ``"pinn"``. A model is ``"dense"``, too, in place of a kind with
            K-FAC, if K-FAC has no block for most of its parameters.
        call: Lines to paste, for a variable ``model``: they make ``optimizer``, and perhaps
            ``preconditioner``, whose `step` comes before the optimizer's.
        lrs: The lowest and the highest learning rate that were good; None if none was measured.
        reason: Why.
        page: The page that measured it; empty if none did.
        plan: The method and the auxiliary method, as `soframe.Preconditioner` takes them.
        strategy: The strategy for several ranks; on one rank all are alike.
        memory: Bytes that the fullest rank holds between steps, by strategy: factors, second-order
            data and states of the methods. An optimizer behind a preconditioner has its own.
        hint: Which models of this kind need another recommendation; empty if none is known.
    """

    kind: str
    call: str
    lrs: tuple[float, float] | None
    reason: str
    page: str
    plan: Mapping[str, Any]
    strategy: str = "comm-opt"
    memory: Mapping[str, int] = field(default_factory=dict)
    hint: str = ""

    def __str__(self) -> str:
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.memory.items())
        rates = "none measured" if self.lrs is None else "{:g} to {:g}".format(*self.lrs)
        lines = {
            "model": self.kind,
            "learning rates": rates,
            "reason": self.reason,
            "measured in": self.page or "no page",
            "a rank holds between steps": held,
        }
        if self.hint:
            lines["but"] = self.hint
        return f"{self.call}\n\n" + "\n".join(f"{name}: {text}" for name, text in lines.items())


WITH_DERIVATIVES = (
    "if the loss has derivatives of the model's outputs, as a PINN's has: "
    'soframe.recommend(model, kind="pinn")'
)

# In a call, "{more}" is the place of the strategy.
ADVICE = (
    Recommendation(
        "pinn",
        'optimizer = soframe.Optimizer(model, method="soap", lr=0.01{more})',
        None,
        "on Poisson's equation, after 400 steps on batches of points, its error is 0.18 to 0.52 of "
        "AdamW's; both rates were tuned, and fall linearly to zero",
        "docs/guides/recipes.md",
        {"method": "soap", "auxiliary": "adamw"},
        strategy="mem-opt",
    ),
    Recommendation(
        "adapters",
        "method = soframe.methods.SOAP(max_ratio=2)\n"
        "optimizer = soframe.Optimizer(model, method=method, lr=3e-4{more})  # or AdamW's rate",
        None,
        "most parameters are frozen, and the trained matrices are thin: their memory is about "
        "AdamW's. On a byte-level GPT it ends where AdamW does, at AdamW's rate; a gain is not "
        "shown. The rate above is usual for large models, and not measured",
        "docs/benchmarks/defaults.md",
        {"method": SOAP(max_ratio=2), "auxiliary": "adamw"},
    ),
    Recommendation(
        "transformer",
        "optimizer = soframe.Optimizer(model, lr=0.04{more})",
        (0.02, 0.06),
        "on a byte-level GPT, a small Llama and a small ViT it reaches the loss of Muon, whose "
        "momentum and rate were tuned, in fewer steps",
        "docs/benchmarks/defaults.md",
        {"method": "soap-normuon", "auxiliary": "adamw"},
        strategy="mem-opt",
    ),
    Recommendation(
        "convolutional",
        "optimizer = torch.optim.SGD(\n"
        "    model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4\n"
        ")\n"
        "preconditioner = soframe.Preconditioner(\n"
        "    model, optimizer=optimizer, damping=3e-3, kl_clip=0.4, solve_every=100{more}\n"
        ")",
        (0.05, 0.2),
        "a ResNet-20 reaches SGD's final accuracy in 0.53 to 0.72 of SGD's time, with learning "
        "rates that fall linearly to zero",
        "docs/benchmarks/kaisa.md",
        {"method": "kfac"},
    ),
    Recommendation(
        "recurrent",
        "optimizer = soframe.Optimizer(model, lr=0.04{more})",
        (0.02, 0.06),
        "on a GRU over the rows of digits it ends at 0.086 to 0.105 at this rate, under three "
        "schedules (means of three seeds), where the best of AdamW's nine is at 0.124",
        "docs/benchmarks/ordinary.md",
        {"method": "soap-normuon", "auxiliary": "adamw"},
        strategy="mem-opt",
        hint="to fit training data with nothing tuned, soframe.StochasticTrustRegion is sooner on "
        "an LSTM; held-out losses of a GRU were higher (docs/benchmarks/suite.md, ordinary.md)",
    ),
    Recommendation(
        "dense",
        "optimizer = soframe.Optimizer(model, lr=0.04{more})",
        (0.012, 0.04),
        "on eight ordinary problems (classes, images, autoencoders, ratings), three seeds of each, "
        "this one rate is ahead of the best of SGD's three on all, and reaches its loss after "
        "0.26 of its steps in the median. Small perceptrons gain steps and not time",
        "docs/benchmarks/ordinary.md",
        {"method": "soap-normuon", "auxiliary": "adamw"},
        strategy="mem-opt",
        hint="if the targets are numbers, and few: soframe.recommend(model, "
        f'kind="regression"). And {WITH_DERIVATIVES}',
    ),
    Recommendation(
        "regression",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "preconditioner = soframe.Preconditioner(model, optimizer=optimizer{more})",
        (0.01, 0.1),
        "on 23 ordinary problems it diverges nowhere, and reaches SGD's best loss after 0.55 of "
        "its steps in the median. Two or three small layers on a table gain steps and not time. "
        "For full batches, soframe.TrustRegion needs no rate",
        "docs/benchmarks/ordinary.md",
        {"method": "kfac"},
        hint=WITH_DERIVATIVES,
    ),
)

WITHOUT_NORMS = (
    "without batch norm the defaults are the safe settings: on two small convolutional nets they "
    "reach SGD's best loss after 0.41 and 0.44 of its steps"
)
"""The reason for a convolutional net with the settings of a dense one."""

ON_RANKS = {
    "docs/benchmarks/kaisa.md": "on four processes, each with 16 images of a batch, a ResNet-20 "
    "reaches SGD's final accuracy in 0.91 of SGD's time, with rates that fall linearly to zero"
}
"""By page: the reason on several ranks, where they were measured."""


def recommend(model: nn.Module, *, ranks: int = 1, kind: str | None = None) -> Recommendation:
    """Recommend a method, its settings and a strategy for a model, from its modules alone.

    Args:
        model: The model, on the device where it is trained.
        ranks: The number of ranks; from two on the call names a strategy.
        kind: The kind of model, see `Recommendation`; None to recognise it by its layers, which
            do not show a ``"pinn"``.

    Returns:
        The recommendation. Nothing runs, and the model does not change.

    Raises:
        ValueError: If ``ranks`` is not positive, the kind is unknown, or the model has nothing to
            precondition.
    """
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")
    model = unwrap(model)
    advice = _advice(model, kind)
    more, reason = "", advice.reason
    if ranks > 1:
        more = f', strategy="{advice.strategy}"'
        reason = ON_RANKS.get(advice.page, reason)
    return replace(
        advice,
        call=advice.call.replace("{more}", more),
        reason=reason,
        memory=_memory(model, advice, ranks),
    )


def _advice(model: nn.Module, kind: str | None) -> Recommendation:
    """Return the entry for a model of some kind; None to recognise it."""
    kinds = {advice.kind: advice for advice in ADVICE}
    if kind is None:
        kind = kind_of(model)
    if kind not in kinds:
        raise ValueError(f"there is no kind {kind!r} of model: choose one of {', '.join(kinds)}")
    advice = kinds[kind]
    if advice.kind in ("convolutional", "regression") and _covered(model) < 0.5:
        return kinds["dense"]
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    if advice.kind == "convolutional" and not has_batch_norm:
        safe = kinds["regression"]
        return replace(safe, kind="convolutional", reason=WITHOUT_NORMS, hint="")
    return advice


def _covered(model: nn.Module) -> float:
    """Return the part of the trained parameters' entries that K-FAC has blocks for."""
    report, _ = inspection.inspect(
        model, ranks=1, strategy="comm-opt", method="kfac", auxiliary="adamw"
    )
    return sum(part for method, part in report.coverage.items() if method != "adamw")


def _memory(model: nn.Module, advice: Recommendation, ranks: int) -> dict[str, int]:
    """Return the bytes of the fullest rank, by strategy, the recommended one first."""
    chosen = advice.strategy
    _, placement = inspection.inspect(model, ranks=ranks, strategy=chosen, **advice.plan)
    sizes = {chosen: placement.fullest["total"]}
    if ranks == 1:
        return sizes
    for name in ("comm-opt", "mem-opt", "sharded"):
        other: Strategy = KINDS["strategy"].build(name, Strategy)
        sizes[name] = complete(other.place(placement.work, ranks)).fullest["total"]
    return sizes
