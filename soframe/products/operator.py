"""Linear operators of a curvature: itself, its damped inverse, their roots, and their spectra.

Ranks without the second-order data of a block receive its results from a gradient worker, as they
receive updates in training. So all ranks call with the same vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soframe.blocks.block import Block, PlacedBlocks
from soframe.comm.agreement import add_over_ranks, fingerprint, require_common
from soframe.comm.fused import Parcel, deliver
from soframe.kernels.precision import within
from soframe.methods.spectrum import Spectrum
from soframe.products.vectors import Coordinates, Vector
from soframe.solvers.eigen import Eigen
from soframe.specs import TensorSpec

Spectra = Mapping[Block, Spectrum]
"""The spectra of the blocks whose second-order data this rank has."""


def spectra_of(placed: PlacedBlocks) -> dict[Block, Spectrum]:
    """Return the spectra of the last solve, of the blocks that this rank preconditions."""
    if unsolved := [block.name for block in placed.blocks if not block.solved]:
        raise RuntimeError(
            f"no curvature yet of {', '.join(unsolved)}: fit it to data; in training, solve() it"
        )
    spectra = {}
    for block, place in placed:
        if placed.rank not in place.gradient_workers:
            continue
        data = block.stack.data_of((block.member,))
        for factor in block.factors:
            solved = factor.kind in ("psd", "diagonal")
            if solved and "values" not in data[factor.name] and factor.name in block.running:
                matrix = block.running.matrix(factor)
                data[factor.name] = Eigen().solve(matrix, matrix.new_zeros(factor.groups))
        spectrum = block.method.spectrum(block.shape, data)
        # The values may be a running factor, which changes in place.
        spectra[block] = replace(spectrum, values=spectrum.values.clone())
    return spectra


def shared(
    placed: PlacedBlocks, results: Mapping[Block, Tensor], leading: tuple[int, ...] = ()
) -> dict[Block, Tensor]:
    """Return results ``[*leading, *block.shape]`` of all blocks to all ranks, which must call."""
    backend, parcels = placed.backend, dict[Block, Parcel]()
    for block, place in placed:
        worker = place.sources[backend.rank]
        group = place.exchanges[worker]
        if len(group) > 1:
            parcels[block] = Parcel(
                worker,
                group,
                (TensorSpec(leading + block.shape),),
                dtype=block.dtype,
                device=block.device,
                tensors=[results[block]] if worker == backend.rank else None,
            )
    deliver(backend, list(parcels.values()), "exchange", fused=backend.fused)
    received = dict(results)
    for block, parcel in parcels.items():
        assert parcel.tensors is not None
        (received[block],) = parcel.tensors
    return {block: received[block] for block in placed.blocks}


@dataclass(frozen=True, eq=False)
class Operator:
    """The matrix ``(C + damping I)^power`` of a curvature C, by products with vectors.

    Attributes:
        placed: The blocks.
        coordinates: The names of their parameters.
        spectra: The spectra that this rank has.
        damping: Added to each eigenvalue.
        power: The exponent. With a negative one, no block is `singular`.
    """

    placed: PlacedBlocks
    coordinates: Coordinates
    spectra: Spectra
    damping: float = 0.0
    power: float = 1.0

    def __matmul__(self, vector: Vector) -> dict[str, Tensor]:
        """Multiply vectors; every rank must call, with the same ones unless all have all data.

        Args:
            vector: Name -> ``[..., *shape]``, of all parameters that have a block.

        Returns:
            The products, of the same shapes, dtypes and devices.

        Raises:
            ValueError: If names or shapes do not fit, or if ranks that depend on each other's data
                have passed different vectors.
        """
        try:
            matrices = self.coordinates.matrices(vector)
        except ValueError as error:
            if not self.is_local:
                self._require_alike(str(error))  # raises on all ranks if the vectors of others fit
            raise
        return self.coordinates.vector(self.apply(matrices), vector)

    def apply(self, matrices: Mapping[Block, Tensor]) -> dict[Block, Tensor]:
        """Multiply vectors as gradient matrices, ``[..., groups, out, in]``; as `__matmul__`."""
        if not self.is_local:
            # Extremes, since sums of the same entries may be rounded differently.
            extremes = [(float(m.min()), float(m.max())) for m in matrices.values() if m.numel()]
            self._require_alike(extremes)
        products: dict[Block, Tensor] = {}
        with within("full"):
            for block, spectrum in self.spectra.items():
                products[block] = spectrum.apply(matrices[block], self._of)
        first = next(iter(matrices.values()))
        return shared(self.placed, products, tuple(first.shape[:-3]))

    def values(self, spectrum: Spectrum) -> Tensor:
        """Return the eigenvalues of this matrix in a block, ``[groups, out, in]``."""
        return self._of(spectrum.values)

    @property
    def is_local(self) -> bool:
        """Whether all ranks have all second-order data, and may multiply vectors of their own."""
        everyone = set(range(self.placed.backend.world_size))
        return all(set(place.gradient_workers) == everyone for _, place in self.placed)

    def singular(self) -> list[str]:
        """Return the blocks in which the matrix has no inverse, with their ranks, as text.

        Without a damping these are the ones with eigenvalues that are zero within rounding, see
        `Curvature.inverse`; then every rank must call.
        """
        least = max(torch.finfo(block.dtype).tiny for block in self.placed.blocks)
        if self.damping >= least:
            return []
        zeros: list[float] = []
        for block, place in self.placed:
            is_counted = self.is_local or self.placed.rank == min(place.gradient_workers)
            zeros.append(float(self.spectra[block].zeros.sum()) if is_counted else 0.0)
        if not self.is_local:
            zeros = add_over_ranks(self.placed.backend, zeros)
        texts: list[str] = []
        for block, number in zip(self.placed.blocks, zeros, strict=True):
            if number > 0:
                size = prod(block.shape)
                texts.append(f"{block.name} (rank {size - number:.0f} of {size})")
        return texts

    def sqrt(self) -> Operator:
        """Return the symmetric root: S with ``S S^T`` this matrix, for samples ``S @ noise``."""
        return replace(self, power=self.power / 2)

    def trace(self, block: str | None = None) -> float:
        """Return the trace, of one block or of all; every rank must call."""
        return self._sum(self.values, block)

    def logdet(self, block: str | None = None) -> float:
        """Return the logarithm of the determinant, of one block or of all; every rank must call.

        It is minus infinity if an eigenvalue is zero within rounding.
        """

        def logarithms(spectrum: Spectrum) -> Tensor:
            return self._of(self._without_rounding(spectrum).values).double().log()

        return self._sum(logarithms, block)

    def eigenvalues(self, block: str | None = None) -> Tensor:
        """Return the eigenvalues, ascending, of one block or of all; every rank must call."""
        powers = {b: self.values(spectrum) for b, spectrum in self.spectra.items()}
        values = shared(self.placed, powers)
        chosen = [values[b].flatten().cpu() for b in self._blocks(block)]
        return torch.cat(chosen).sort().values

    def to_scipy(self) -> Any:
        """Return it as a ``scipy.sparse.linalg.LinearOperator``.

        Its vectors are the entries of all parameters with a block, in the order of the model.
        """
        from scipy.sparse.linalg import LinearOperator

        first = next(iter(self.placed.blocks))
        dtype = np.dtype(str(first.dtype).removeprefix("torch."))

        def multiply(columns: Any) -> Any:
            entries = torch.from_numpy(np.array(columns.T, dtype=dtype)).to(first.device)
            product = self @ self.coordinates.unflat(entries)
            return self.coordinates.flat(product).cpu().numpy().T

        size = self.coordinates.size
        return LinearOperator(
            (size, size), matvec=multiply, rmatvec=multiply, matmat=multiply, dtype=dtype
        )

    def _of(self, values: Tensor) -> Tensor:
        damped = values + self.damping
        if self.power == 1:
            return damped
        return damped.clamp(min=0).pow(self.power)

    def _without_rounding(self, spectrum: Spectrum) -> Spectrum:
        """Return a spectrum with zeros in place of their rounding, where no damping exceeds it."""
        if self.damping or spectrum.null is None:
            return spectrum
        return replace(spectrum, values=spectrum.values.masked_fill(spectrum.null, 0.0))

    def _blocks(self, name: str | None) -> list[Block]:
        blocks = [block for block in self.placed.blocks if name in (None, block.name)]
        if not blocks:
            known = ", ".join(block.name for block in self.placed.blocks)
            raise ValueError(f"{name!r} is no block; the blocks are {known}")
        return blocks

    def _sum(self, function: Callable[[Spectrum], Tensor], name: str | None) -> float:
        """Sum a function of the spectra, each block on one of the ranks that have it."""
        total, blocks = 0.0, set(self._blocks(name))
        for block, place in self.placed:
            first = min(place.gradient_workers)
            if block in blocks and self.placed.rank == first:
                total += float(function(self.spectra[block]).double().sum())
        (total,) = add_over_ranks(self.placed.backend, [total])
        return total

    def _require_alike(self, entries: object) -> None:
        """Check that ranks have the same vectors, since one computes products for others."""
        common = {"the extreme entries of the vector by block": entries}
        backend = self.placed.backend
        sums = add_over_ranks(backend, fingerprint(common))
        require_common(
            backend,
            common,
            sums,
            "; pass the same vectors on all ranks, or strategy='comm-opt' for each its own",
        )
