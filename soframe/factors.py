"""A file with the Kronecker factors of each layer, for quantisers and pruners.

A is the second moment of a layer's inputs and G of its output gradients (`soframe.methods.scaling`
has the convention, and so has the file). ``2 A`` is the Hessian that GPTQ and its kin build with
hooks of their own (Frantar et al., 2023); G weighs the outputs, where a method takes both sides::

    curvature = soframe.Curvature(model, statistics=soframe.Statistics(fisher="forward-only"))
    soframe.factors.save(curvature.fit(loader, loss), "factors.safetensors")
    hessian = 2 * soframe.factors.load("factors.safetensors").tensors["fc.A"][0]
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.curvature import Curvature
from soframe.state import disk

FORMAT = "soframe factors 1"
CONVENTION = (
    "A [groups, in, in] = (1/N) sum over samples n and positions t of a a^T, with a the inputs in "
    "the order in which the weight has its entries of one output (weight.flatten(1) of a Linear or "
    "a convolution), and 1 as the last entry where bias_column; G [groups, out, out] = mean over "
    "rows (samples and positions) of g g^T, with g the gradient of the loss of one sample in the "
    "layer's outputs; number has N, and the rows of G's mean; factors of the kind diagonal are "
    "[groups, n]. A layer's curvature is A kron G; GPTQ's Hessian is 2 A."
)


@dataclass(frozen=True)
class Factors:
    """The factors of a file.

    Attributes:
        tensors: The factors by name of block and factor, such as ``"fc.A"``, ``[groups, n, n]``,
            or ``[groups, n]`` of a diagonal.
        layers: Block -> its parameters, the shape ``[groups, out, in]`` of its gradient matrix,
            whether the last input is the bias's, and for each factor its kind, its shape, and the
            number of samples or rows of its mean.
        fisher: The kind of Fisher that G is of.
    """

    tensors: Mapping[str, Tensor]
    layers: Mapping[str, Mapping[str, Any]]
    fisher: str


def save(curvature: Curvature, file: str | os.PathLike[str]) -> Path:
    """Write the factors of a fitted curvature into one file, on the calling rank, atomically.

    Args:
        curvature: A fitted curvature, of a method with the factors A and perhaps G.
        file: ``*.safetensors``, which needs the package safetensors; of any other name torch's own
            format. Both have the same tensors and texts.

    Returns:
        The file.

    Raises:
        ImportError: If the package safetensors is missing.
        ValueError: If no block has a factor A or G, or this rank does not hold one.
        RuntimeError: If the curvature is not fitted.
    """
    path, tensors, layers = Path(file), dict[str, Tensor](), dict[str, Any]()
    curvature.inverse(1.0)  # raises where it is not fitted, and starts no collective
    for block in curvature.blocks:
        layers[block.name] = curvature.meaning_of(block)
        for factor in block.factors:
            if factor.name not in ("A", "G"):
                continue
            if factor.name not in block.running:
                raise ValueError(
                    f"this rank does not hold the factor {factor.name} of {block.name}: save the "
                    f"curvature (Curvature.save), and load it under strategy='comm-opt'"
                )
            matrix = block.running.matrix(factor).detach().cpu()
            if factor.side == "right":
                matrix = _in_order_of_weight(matrix, block)
            key = f"{block.name}.{factor.name}" if block.name else factor.name
            tensors[key] = matrix.clone(memory_format=torch.contiguous_format)
    if not tensors:
        raise ValueError("the method has no factors A or G: save the curvature (Curvature.save)")
    fisher = curvature.parts.fisher.kind
    texts = {"format": FORMAT, "convention": CONVENTION, "fisher": fisher}
    texts["layers"] = json.dumps(layers)
    if path.suffix == ".safetensors":
        write = _safetensors(path).torch.save_file
        disk.replace(path, lambda file: write(tensors, file.name, metadata=texts))
    else:
        contents = {"metadata": texts, "tensors": tensors}
        disk.replace(path, lambda file: torch.save(contents, file))
    return path


def load(file: str | os.PathLike[str]) -> Factors:
    """Read a file of `save`.

    Args:
        file: The file.

    Returns:
        Its factors.

    Raises:
        ImportError: If the package safetensors is missing.
        OSError: If it cannot be read.
        ValueError: If it is another file, or damaged.
    """
    path = Path(file)
    path.open("rb").close()  # raises where it cannot be read
    try:
        texts, tensors = _read(path)
        if texts["format"] != FORMAT:
            raise ValueError(texts["format"])
        return Factors(tensors, json.loads(texts["layers"]), texts["fisher"])
    except ImportError:
        raise
    except Exception as error:  # of any kind: those of torch, pickle and safetensors differ
        raise ValueError(
            f"{path} has no factors of this version ({FORMAT}): write it by soframe.factors.save"
        ) from error


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the texts and tensors of a file."""
    if path.suffix == ".safetensors":
        with _safetensors(path).safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return opened.metadata() or {}, tensors
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return saved["metadata"], saved["tensors"]


def _in_order_of_weight(matrix: Tensor, block: Block) -> Tensor:
    """Reorder a factor of inputs, whose order in a convolution's block is by position."""
    numbers: dict[str, Tensor] = {}
    start = 0
    for key, parameter in block.parameters.items():  # the weight, then the bias
        stop = start + parameter.numel()
        entries = torch.arange(start, stop, dtype=torch.float64, device="cpu")
        numbers[key] = entries.view(parameter.shape)
        start = stop
    order = block.layout.pack(numbers)[0, 0].argsort()  # of the first output
    matrix = matrix[:, order]
    return matrix[:, :, order] if matrix.dim() == 3 else matrix


def _safetensors(path: Path) -> Any:
    """Return the package, with its functions for torch."""
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError(
            f"{path} needs the package safetensors: pip install safetensors, or write another "
            f"name, such as factors.pt, for torch's own format"
        ) from error
