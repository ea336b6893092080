"""The gallery's updates, written out anew in NumPy for one matrix, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Reference = Callable[[Sequence[Matrix]], Iterator[Matrix]]
"""From the gradients of a run, ``[out, in]`` each, to its updates."""


def newton_schulz(matrix: Matrix, steps: int = 5) -> Matrix:
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def polar(matrix: Matrix) -> Matrix:
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left @ right


def power(matrix: Matrix, exponent: float, epsilon: float) -> Matrix:
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, 0) + epsilon * values[-1]
    return vectors @ np.diag(values**exponent) @ vectors.T


def averages(samples: Sequence[Matrix], beta: float) -> list[Matrix]:
    """Weighted means of all samples so far: running averages with bias correction."""
    means = []
    for end in range(1, len(samples) + 1):
        weights = [beta ** (end - 1 - index) for index in range(end)]
        total = sum(w * sample for w, sample in zip(weights, samples[:end], strict=True))
        means.append(total / sum(weights))
    return means


def momenta(gradients: Sequence[Matrix], beta: float) -> list[Matrix]:
    """Running averages from zero."""
    means = averages(gradients, beta)
    return [(1 - beta ** (index + 1)) * mean for index, mean in enumerate(means)]


def adams(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    means = averages(gradients, 0.9)
    squares = averages([gradient**2 for gradient in gradients], 0.999)
    for mean, square in zip(means, squares, strict=True):
        yield mean / (np.sqrt(square) + 1e-8)


def graded(factor: Matrix) -> Matrix:
    """A factor whose eigenvalues differ, see `soframe.solvers.Basis`."""
    size = len(factor)
    return factor + np.trace(factor) / size * 1e-4 * np.diag(np.linspace(1, 2, size))


def bases(factors: Sequence[Matrix]) -> Iterator[Matrix]:
    basis = np.linalg.eigh(factors[0])[1][:, ::-1]
    for factor in factors:
        basis = np.linalg.qr(graded(factor) @ basis)[0]
        yield basis


def splus(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    lefts = bases(averages([g @ g.T for g in gradients], 0.999))
    rights = bases(averages([g.T @ g for g in gradients], 0.999))
    for momentum, left, right in zip(momenta(gradients, 0.9), lefts, rights, strict=True):
        turned = np.sign(left.T @ momentum @ right)
        yield 2 / sum(momentum.shape) * left @ turned @ right.T


def psgd_kron(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    out, into = gradients[0].shape
    scale = np.mean(gradients[0] ** 4) ** (-1 / 16)
    left, right = scale * np.eye(out), scale * np.eye(into)
    left_bound = right_bound = 0.0
    momentum = np.zeros((out, into))
    for gradient in gradients:
        whole = np.kron(left @ left, right @ right)  # of the entries, row by row
        white = (whole @ gradient.ravel()).reshape(out, into)
        length = np.linalg.eigvalsh(white @ white.T)[-1] + into
        left_bound = max(length, 0.9 * left_bound + 0.1 * length)
        step = np.eye(out) - 0.05 / left_bound * (white @ white.T - into * np.eye(out))
        left = step @ left @ step
        length = np.linalg.eigvalsh(white.T @ white)[-1] + out
        right_bound = max(length, 0.9 * right_bound + 0.1 * length)
        step = np.eye(into) - 0.05 / right_bound * (white.T @ white - out * np.eye(into))
        right = step @ right @ step
        momentum = 0.9 * momentum + 0.1 * gradient
        whole = np.kron(left @ left, right @ right)
        yield (whole @ momentum.ravel()).reshape(out, into)


def gram_schmidt(columns: Matrix) -> Matrix:
    basis: list[Matrix] = []
    for column in columns.T:
        rest = column - sum((column @ vector) * vector for vector in basis)
        basis.append(rest / np.linalg.norm(rest))
    return np.stack(basis, axis=1)


def dion(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    """With all columns: the first right factor spans everything, whatever it is."""
    import torch

    out, into = gradients[0].shape
    rank = min(out, into)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((into, rank), generator=generator, dtype=torch.float64).numpy()
    right, buffer = gram_schmidt(start), np.zeros((out, into))
    for gradient in gradients:
        buffer = buffer + gradient
        left = gram_schmidt(buffer @ right)
        product = buffer.T @ left
        buffer = buffer - 0.05 * left @ product.T
        right = product / np.sqrt((product**2).sum(axis=0))
        yield np.sqrt(out / into) * left @ right.T


def adamuon(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    square = np.zeros_like(gradients[0])
    for momentum in momenta(gradients, 0.95):
        orthogonal = newton_schulz(np.sign(momentum))
        square = 0.95 * square + 0.05 * orthogonal**2
        scaled = orthogonal / (np.sqrt(square) + 1e-8)
        yield 0.2 * np.sqrt(scaled.size / (scaled**2).sum()) * scaled


def conda(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    """With one basis for all steps."""
    out, into = gradients[0].shape
    side = gradients[0] @ gradients[0].T if out <= into else gradients[0].T @ gradients[0]
    basis = np.linalg.eigh(side)[1]
    turned = [basis.T @ g if out <= into else g @ basis for g in gradients]
    means = averages(turned, 0.9)
    squares = averages([matrix**2 for matrix in turned], 0.99)
    for mean, square in zip(means, squares, strict=True):
        update = mean / (np.sqrt(square) + 1e-8)
        yield basis @ update if out <= into else update @ basis.T


def mars_muon(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    before, momentum = gradients[0], np.zeros_like(gradients[0])
    for gradient in gradients:
        corrected = gradient + 0.025 * 0.95 / 0.05 * (gradient - before)
        corrected = corrected / max(1.0, np.sqrt((corrected**2).sum()))
        momentum = 0.95 * momentum + 0.05 * corrected
        before = gradient
        yield 0.2 * np.sqrt(max(gradient.shape)) * newton_schulz(momentum)


def swan(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    for gradient in gradients:
        rows = [(row - row.mean()) / row.std() for row in gradient]
        standard = np.stack(rows)
        whitened = polar(standard)
        # A row of mean zero has lost one dimension: the rest of a singular matrix is no direction.
        values = np.linalg.svd(standard, compute_uv=False)
        if values[-1] < 1e-12 * values[0]:
            left, _, right = np.linalg.svd(standard, full_matrices=False)
            whitened = left[:, :-1] @ right[:-1]
        yield whitened * np.sqrt((standard**2).sum() / (whitened**2).sum())


def caspr(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    out, into = gradients[0].shape
    lefts = averages([g @ g.T for g in gradients], 0.999)
    rights = averages([g.T @ g for g in gradients], 0.999)
    lengths = [np.linalg.norm(update) for update in adams(gradients)]
    steps = zip(gradients, momenta(gradients, 0.9), lefts, rights, lengths, strict=True)
    for gradient, momentum, left, right, length in steps:
        nesterov = 0.9 * momentum + 0.1 * gradient
        along_rows = np.kron(power(left, -0.25, 1e-6), np.eye(into))
        along_columns = np.kron(np.eye(out), power(right, -0.25, 1e-6))
        mean = (along_rows + along_columns) / 2
        update = (mean @ mean @ nesterov.ravel()).reshape(out, into)
        yield update * length / np.linalg.norm(update)


def racs(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    out, into = gradients[0].shape
    running_rows, running_columns, longest = np.zeros(out), np.zeros(into), np.inf
    for gradient in gradients:
        rows, columns = np.ones(out), np.ones(into)
        for _ in range(5):
            for j in range(into):
                columns[j] = (rows * gradient[:, j] ** 2).sum() / (rows**2).sum()
            for i in range(out):
                rows[i] = (columns * gradient[i] ** 2).sum() / (columns**2).sum()
        running_rows = 0.9 * running_rows + 0.1 * rows
        running_columns = 0.9 * running_columns + 0.1 * columns
        scaled = gradient / np.sqrt(np.outer(running_rows, running_columns))
        norm = np.sqrt((scaled**2).sum())
        limited = scaled * min(1.0, longest / norm)
        longest = 1.01 * np.sqrt((limited**2).sum())
        yield 0.05 * limited


def sinkgd(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    for gradient in gradients:
        matrix = gradient
        for _ in range(5):
            matrix = np.stack([row / np.sqrt((row**2).mean()) for row in matrix])
            matrix = np.stack([column / np.sqrt((column**2).mean()) for column in matrix.T]).T
        yield matrix


def polargrad(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    for momentum in momenta(gradients, 0.95):
        yield polar(momentum) * np.linalg.svd(momentum, compute_uv=False).sum()


def mousse(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    momentum = np.zeros_like(gradients[0])
    lefts = averages([g @ g.T for g in gradients], 0.95)
    rights = averages([g.T @ g for g in gradients], 0.95)
    for gradient, left, right in zip(gradients, lefts, rights, strict=True):
        momentum = 0.95 * momentum + gradient
        powers = {}
        for name, factor in (("left", left), ("right", right)):
            values, vectors = np.linalg.eigh(factor * len(factor) / np.trace(factor))
            values = np.maximum(values, 1e-6)
            for exponent in (-0.125, 0.125):
                powers[name, exponent] = vectors @ np.diag(values**exponent) @ vectors.T
        white = powers["left", -0.125] @ momentum @ powers["right", -0.125]
        orthogonal = newton_schulz(white)
        update = powers["left", 0.125] @ orthogonal @ powers["right", 0.125]
        yield update * np.linalg.norm(orthogonal) / np.linalg.norm(update)


def spectral(matrix: Matrix, steps: int = 5) -> Matrix:
    out, into = matrix.shape
    return np.sqrt(max(1.0, out / into)) * newton_schulz(matrix, steps)


def muon_squared(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    squares = momenta([gradient**2 for gradient in gradients], 0.95)
    for momentum, square in zip(momenta(gradients, 0.95), squares, strict=True):
        yield spectral(momentum / np.sqrt(square + 1e-8), steps=3)


def muon_eq(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    for momentum in momenta(gradients, 0.95):
        balanced = np.stack([row / np.sqrt((row**2).sum()) for row in momentum])
        yield 0.2 * np.sqrt(max(momentum.shape)) * newton_schulz(balanced)


def muon_vs(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    mean, variance = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for count, gradient in enumerate(gradients, 1):
        variance = 0.95 * variance + 0.95 * 0.05 * (mean - gradient) ** 2
        mean = 0.95 * mean + 0.05 * gradient
        correction = 1 - 0.95**count
        ahead = gradient + 0.95 / 0.05 * mean / correction
        yield spectral(ahead / np.sqrt(variance / correction + 1e-8))


def unit(matrix: Matrix) -> Matrix:
    return matrix / np.sqrt((matrix**2).mean())


def cosmos(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    rank = max(1, min(gradients[0].shape) // 2)
    means = momenta(gradients, 0.95)
    square = np.zeros((len(gradients[0]), rank))
    basis = np.linalg.svd(gradients[0])[2][:rank].T
    moment = np.zeros((rank, rank))
    for count, (gradient, mean) in enumerate(zip(gradients, means, strict=True), 1):
        # The running average in the old subspace, and the new gradient's whole moment.
        whole = 0.95 * basis @ moment @ basis.T + 0.05 * gradient.T @ gradient
        if count > 1:
            basis = gram_schmidt(whole @ basis)
        moment = basis.T @ whole @ basis
        square = 0.95 * square + 0.05 * (gradient @ basis) ** 2
        correction = 1 - 0.95**count
        adaptive = (mean @ basis) / correction / np.sqrt((square + 1e-8) / correction)
        rest = mean @ (np.eye(len(basis)) - basis @ basis.T)
        yield unit(adaptive @ basis.T + 0.2 * unit(newton_schulz(rest)))


def jorge(gradients: Sequence[Matrix]) -> Iterator[Matrix]:
    out, into = gradients[0].shape
    left, right = 1e-6**-0.25 * np.eye(out), 1e-6**-0.25 * np.eye(into)
    mean, total = np.zeros((out, into)), np.zeros((out, into))

    def updated(root: Matrix, moment: Matrix) -> Matrix:
        x = root @ root @ root @ root @ moment
        norm = np.sqrt((x**2).sum())
        decay = norm / (norm + 1)
        x = (1 - decay) / decay * x
        return decay**-0.25 * root @ (np.eye(len(x)) - x / 4 + 5 * x @ x / 32)

    for gradient in gradients:
        left = updated(left, gradient @ gradient.T)
        right = updated(right, gradient.T @ gradient)
        mean = 0.9 * mean + 0.1 * left @ gradient @ right
        total = 0.9 * total + gradient
        yield mean * np.linalg.norm(total) / np.linalg.norm(mean)


Samples = Sequence[tuple[Matrix, Matrix]]
"""Of each step the inputs ``[N, in]`` and the output gradients ``[N, out]`` of its samples."""


def gradient_of(inputs: Matrix, outputs: Matrix) -> Matrix:
    return outputs.T @ inputs / len(inputs)


def adafisher(samples: Samples) -> Iterator[Matrix]:
    inputs = averages([(a**2).mean(axis=0) for a, _ in samples], 0.92)
    outputs = averages([(g**2).mean(axis=0) for _, g in samples], 0.92)
    means = averages([gradient_of(a, g) for a, g in samples], 0.9)
    for mean, h, s in zip(means, inputs, outputs, strict=True):
        product = np.outer((s - s.min()) / np.ptp(s), (h - h.min()) / np.ptp(h))
        yield mean / (product + 1e-3)


def sophia_g(samples: Samples) -> Iterator[Matrix]:
    """Of the empirical Fisher, whose sample gradients can be written down."""
    squares = [
        np.mean([np.outer(y, x) ** 2 for x, y in zip(a, g, strict=True)], 0) for a, g in samples
    ]
    curvatures = averages(squares, 0.99)
    means = momenta([gradient_of(a, g) for a, g in samples], 0.96)
    for mean, curvature in zip(means, curvatures, strict=True):
        yield np.clip(mean / np.maximum(0.05 * curvature, 1e-12), -1, 1)


def mkor(samples: Samples) -> Iterator[Matrix]:
    """With inverses by LAPACK, and the factors whose inverses are kept."""
    momentum: Matrix | float = 0.0
    inverses = {0: np.eye(samples[0][0].shape[1]), 1: np.eye(samples[0][1].shape[1])}
    for pair in samples:
        for side, rows in enumerate(pair):
            vector = rows.mean(axis=0)
            factor = 0.95 * np.linalg.inv(inverses[side]) + 0.05 * np.outer(vector, vector)
            inverse = np.linalg.inv(factor)
            if np.abs(inverse).max() > 2:
                inverse = 0.9 * inverse + 0.1 * np.eye(len(inverse))
            inverses[side] = inverse
        gradient = gradient_of(*pair)
        update = inverses[1] @ gradient @ inverses[0]
        update *= np.linalg.norm(gradient) / np.linalg.norm(update)
        momentum = 0.9 * momentum + update
        yield momentum


def ikfac(samples: Samples, size: int = 32) -> Iterator[Matrix]:
    """With dense roots of whole sides, of which only the diagonal blocks are not zero."""
    sides = [rows.shape[1] for rows in samples[0]]
    roots = [np.eye(side) for side in sides]
    for pair in samples:
        for index, (side, rows) in enumerate(zip(sides, pair, strict=True)):
            block = np.arange(side) // min(size, side)
            moment = np.mean([np.outer(row, row) for row in rows], axis=0)
            moment = np.where(block[:, None] == block, moment, 0.0) + 1e-3 * np.eye(side)
            move = (roots[index].T @ moment @ roots[index] - np.eye(side)) / 2
            rate = 0.05 / max(1.0, np.sqrt((move**2).sum()))
            roots[index] = roots[index] - rate * roots[index] @ move
        yield roots[1] @ roots[1].T @ gradient_of(*pair) @ roots[0] @ roots[0].T


def lora_pro(
    right: Matrix, left: Matrix, of_right: Matrix, of_left: Matrix, scale: float
) -> tuple[Matrix, Matrix]:
    """The updates of A and B, by one linear system for X."""
    rank = len(right)
    inner = np.linalg.inv(left.T @ left) @ of_right / scale**2
    system = np.kron(left.T @ left, np.eye(rank)) + np.kron(np.eye(rank), right @ right.T)
    free = np.linalg.solve(system, -(inner @ right.T).ravel()).reshape(rank, rank)
    projected = np.eye(len(left)) - left @ np.linalg.inv(left.T @ left) @ left.T
    outside = projected @ of_left @ np.linalg.inv(right @ right.T) / scale**2
    return inner + free @ right, outside - left @ free


CALLS: dict[str, Callable[..., Iterator[Matrix]]] = {
    "adafisher": adafisher,
    "ikfac": ikfac,
    "mkor": mkor,
    "sophia-g": sophia_g,
}
"""Methods that read inputs and output gradients of calls."""

GRADIENTS: dict[str, tuple[Reference, float]] = {
    "adamuon": (adamuon, 1e-9),
    "caspr": (caspr, 1e-9),
    "conda": (conda, 1e-7),
    "cosmos": (cosmos, 1e-9),
    "dion": (dion, 1e-9),
    "jorge": (jorge, 1e-9),
    "mars-muon": (mars_muon, 1e-9),
    "mousse": (mousse, 1e-9),
    "muon-eq": (muon_eq, 1e-9),
    "muon-squared": (muon_squared, 1e-9),
    "muon-vs": (muon_vs, 1e-9),
    "polargrad": (polargrad, 1e-3),
    "psgd-kron": (psgd_kron, 1e-9),
    "racs": (racs, 1e-9),
    "sinkgd": (sinkgd, 1e-9),
    "splus": (splus, 1e-9),
    "swan": (swan, 1e-3),
}
"""Methods that read gradients alone, with the largest relative error."""
