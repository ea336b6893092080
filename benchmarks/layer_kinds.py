"""Whether other libraries serve a kind of layers, for `tests.products.table`.

Libraries are those installed here::

    pip install curvlinops-for-pytorch==3.0.1 laplace-torch==0.3 kronfluence==1.0.1 \\
        dattri-llm==0.1.0

The layers get a linear head of three classes, which all libraries serve. The share of a parameter
in an operator is 1 if its vectors have a product, and 0 if they have none. Libraries of scores are
asked with a damping so large that a score is the product of two samples' gradients: the shares are
the coefficients of the parameters' products in it, by least squares.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.influence import CONTENDERS, Data, Result, Task, quiet

CLASSES, DAMPING = 3, 1e5
Shares = dict[str, float]


@dataclass(frozen=True)
class Library:
    """A library.

    Attributes:
        module: The name that it is imported by.
        shares: From a model and its data to the shares of the parameters, by name.
    """

    module: str
    shares: Callable[[nn.Module, Data], Shares]


def verdict(library: Library, layers: nn.Module, inputs: Tensor) -> str:
    """Return what a library does with layers.

    Returns:
        ``"served"``, ``"refused"`` with an error, which is printed, ``"left out"`` where a
        parameter has no share, or ``"wrong"`` where scores are not the products of its gradients.
    """
    torch.manual_seed(0)
    body = nn.Sequential(layers, nn.Flatten(), nn.Tanh())
    with torch.no_grad():
        width = body(inputs).shape[1]
    model = nn.Sequential(body, nn.Linear(width, CLASSES)).eval()
    data = inputs, torch.arange(len(inputs)) % CLASSES
    try:
        with quiet():
            shares = library.shares(model, data)
    except Exception as error:  # of whichever type: that a library raises is the result
        print(f"{' '.join(str(layers).split())}: {library.module}: {error!r}", file=sys.stderr)
        return "refused"
    if any(abs(share) < 0.1 for share in shares.values()):
        return "left out"
    if any(abs(share - 1) > 0.1 for share in shares.values()):
        return "wrong"
    return "served"


def of_operator(model: nn.Module, times: Callable[[Tensor], Tensor]) -> Shares:
    """Return 1 for the parameters whose vectors have a product, by an operator on flat vectors."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    random = torch.randn(sum(sizes.values()), generator=torch.Generator().manual_seed(0))
    shares = {}
    start = 0
    for name, size in sizes.items():
        vector = torch.zeros_like(random)
        vector[start : start + size] = random[start : start + size]
        shares[name] = float(times(vector).abs().max() > 1e-8)
        start += size
    return shares


def curvlinops_shares(model: nn.Module, data: Data) -> Shares:
    """Return the shares in curvlinops' K-FAC, of the type-2 Fisher."""
    from curvlinops import KFACLinearOperator

    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        [*model.parameters()],
        [data],
        fisher_type="type-2",
        separate_weight_and_bias=False,
    )
    return of_operator(model, lambda vector: operator @ vector)


def laplace_shares(model: nn.Module, data: Data) -> Shares:
    """Return the shares in laplace-torch's Kronecker products, by the backend that it chooses."""
    from laplace import KronLaplace
    from torch.utils.data import DataLoader, TensorDataset

    laplace = KronLaplace(model, "classification")
    laplace.fit(DataLoader(TensorDataset(*data), batch_size=len(data[1])))
    return of_operator(model, lambda vector: laplace.H.bmm(vector, exponent=1))


def of_scores(run: Callable[[Task], Result]) -> Callable[[nn.Module, Data], Shares]:
    """Return how shares are computed of the scores of a contender of `benchmarks.influence`."""

    def shares(model: nn.Module, data: Data) -> Shares:
        products = products_of(model, data)
        scores = DAMPING * run(Task(model, data, data, DAMPING)).scores
        columns = torch.stack([product.flatten() for product in products.values()], 1)
        solution = torch.linalg.lstsq(columns.double(), scores.double().reshape(-1, 1)).solution
        return dict(zip(products, solution.flatten().tolist(), strict=True))

    return shares


def products_of(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """Return products of samples' gradients by parameter, ``[samples, samples]``."""
    gradients: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for inputs, classes in zip(data[0].split(1), data[1].split(1), strict=True):
        model.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients[name].append(parameter.grad.flatten().clone())
    model.zero_grad()
    rows = {name: torch.stack(of_samples) for name, of_samples in gradients.items()}
    return {name: matrix @ matrix.T for name, matrix in rows.items()}


LIBRARIES = {
    "curvlinops": Library("curvlinops", curvlinops_shares),
    "laplace-torch": Library("laplace", laplace_shares),
    "kronfluence": Library("kronfluence", of_scores(CONTENDERS["kronfluence"].run)),
    "dattri-LLM": Library("dattri_llm", of_scores(CONTENDERS["dattri-LLM"].run)),
}
