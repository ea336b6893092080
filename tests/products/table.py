"""Errors of products with a curvature, for each kind of layers, against dense float64 matrices.

python -m tests.products.table

Beside them stands what other libraries make of the same layers, where they are installed. The
errors by other methods are in test_table.py, on several ranks under every strategy in
test_ranks.py, and with fully_shard and tensor-parallel plans in test_sharded.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import soframe
from benchmarks.layer_kinds import LIBRARIES, verdict
from soframe.blocks import sharding
from soframe.laplace import Laplace
from tests.curvature import randn
from tests.products.kinds import KINDS, Batch, Kind, Vector, loss

DAMPING, PRECISION = 0.3, 0.7
COLUMNS = (
    "product",
    "inverse",
    "root",
    "trace",
    "logdet",
    "eigenvalues",
    "gradients",
    "influence",
    "sample",
)


def vectors(kind: Kind, number: int = 2) -> dict[str, Tensor]:
    """Return random vectors ``[number, *shape]``."""
    named = kind.model.named_parameters()
    return {name: randn(number, *p.shape, seed=i) for i, (name, p) in enumerate(named)}


def taken(kind: Kind, vector: Vector) -> list[Tensor]:
    """Return vectors ``[number, *shape]`` as ``[number, groups, out * in]``, by part."""
    number = len(next(iter(vector.values())))
    rows = [{name: tensor[i] for name, tensor in vector.items()} for i in range(number)]
    return [torch.stack([part.take(row).flatten(1) for row in rows]) for part in kind.parts]


def errors(
    curvature: soframe.Curvature,
    kind: Kind,
    data: list[Batch],
    dense: list[Tensor] | None = None,
) -> dict[str, float]:
    """Return the largest relative error of each operation, by matrices of K-FAC or another method.

    The matrices are ``[groups, out * in, out * in]`` for each part.
    """
    if dense is None:
        dense = kind.matrices(data)
    damped = [c + DAMPING * torch.eye(c.shape[-1], dtype=c.dtype) for c in dense]
    inverses = [torch.linalg.inv(c) for c in damped]
    values = torch.cat([torch.linalg.eigvalsh(c).flatten() for c in dense])
    vector, inverse = vectors(kind), curvature.inverse(DAMPING)
    given = taken(kind, vector)
    root = inverse.sqrt()
    found = {
        "product": _error(taken(kind, curvature @ vector), _times(dense, given)),
        "inverse": _error(taken(kind, inverse @ vector), _times(inverses, given)),
        # S is symmetric, and S S^T the inverse.
        "root": _error(taken(kind, root @ (root @ vector)), _times(inverses, given)),
        "trace": _error([_double(curvature.trace())], [values.sum()]),
        "logdet": _error(
            [_double(curvature.logdet(DAMPING))],
            [torch.stack([torch.linalg.slogdet(c)[1].sum() for c in damped]).sum()],
        ),
        "eigenvalues": _error([curvature.eigenvalues()], [values.sort().values]),
    }
    query, train = data[0], data[1:]
    own = [kind.gradients(batch) for batch in data]
    found["gradients"] = max(
        float((tensor - own[0][name]).abs().max() / own[0][name].abs().max())
        for name, tensor in curvature.gradients(query, loss).dense().items()
    )
    scores = soframe.influence.scores(curvature, [query], train, loss, damping=DAMPING)
    solved = _times(inverses, taken(kind, own[0]))
    parts = zip(solved, *(taken(kind, gradients) for gradients in own[1:]), strict=True)
    wanted = sum(torch.einsum("qgp,tgp->qt", q, torch.cat(t)) for q, *t in parts)
    assert isinstance(wanted, Tensor)
    found["influence"] = _error([scores], [wanted])
    found["sample"] = _error(taken(kind, deviations(curvature)), _times(roots(dense, data), given))
    return found


def deviations(curvature: soframe.Curvature) -> dict[str, Tensor]:
    """Return samples of the posterior less the weights, from the noise of `vectors`."""
    model, laplace = curvature.parts.model, Laplace(curvature, PRECISION)
    weights = {name: sharding.whole(p).detach() for name, p in model.named_parameters()}
    noise = iter([randn(2, *weight.shape, seed=i) for i, weight in enumerate(weights.values())])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "randn", lambda *shape, **options: next(noise))
        samples = laplace.sample(2)
    return {name: rows - weights[name] for name, rows in samples.items()}


def roots(dense: list[Tensor], data: list[Batch]) -> list[Tensor]:
    """Return the symmetric roots of the posterior's covariance by part."""
    samples = sum(len(targets) for _, targets in data)
    found = []
    for matrix in dense:
        values, vectors = torch.linalg.eigh(samples * matrix)
        scaled = vectors / (values + PRECISION).sqrt().unsqueeze(1)
        found.append(scaled @ vectors.mT)
    return found


def _double(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _times(matrices: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    pairs = zip(matrices, given, strict=True)
    return [torch.einsum("gpr,ngr->ngp", matrix, rows) for matrix, rows in pairs]


def _error(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float(((f - w).abs().max() / w.abs().max()).detach()) for f, w in pairs)


def verdicts(build: Callable[[], Kind]) -> list[str]:
    """Return what the libraries that are installed do with the layers of a kind."""
    words = []
    for library in LIBRARIES.values():
        if importlib.util.find_spec(library.module) is not None:
            kind = build()
            inputs = torch.cat([batch[0] for batch in kind.data()])
            if inputs.is_floating_point():
                inputs = inputs.float()
            words.append(verdict(library, kind.model.float(), inputs))
    return words


def main() -> None:
    """Print the table."""
    libraries = [
        name for name, library in LIBRARIES.items() if importlib.util.find_spec(library.module)
    ]
    print(f"{'':<26}" + "".join(f"{column:>15}" for column in (*COLUMNS, *libraries)))
    for name, build in KINDS.items():
        kind = build()
        data = kind.data()
        curvature = soframe.Curvature(kind.model, layers=kind.layers).fit(data, loss)
        of_kind = errors(curvature, kind, data)
        cells = [f"{of_kind[c]:.0e}" if c in of_kind else "refused" for c in COLUMNS]
        cells += verdicts(build)
        print(f"{name:<26}" + "".join(f"{cell:>15}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
