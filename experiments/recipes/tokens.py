"""The command that turns text into files of tokens, ``train.bin`` and ``val.bin``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.libraries import require


@dataclass(frozen=True)
class Settings:
    """Turn text into train.bin and val.bin, uint16 tokens, for gpt2 and bert_large."""

    text: tuple[Path, ...]
    """Files of text, UTF-8."""
    output: Path = Path("data")
    """Folder of the two files."""
    tokenizer: str = "bytes"
    """`bytes` for the bytes of UTF-8, a vocabulary of 256; or a Hugging Face tokenizer, as `gpt2`
    or the folder of one."""
    held_out: float = 0.05
    """Fraction of the tokens of each file, its end, that goes into val.bin."""


def write(settings: Settings) -> dict[str, int]:
    """Write the files, and return the number of tokens in each.

    Raises:
        ValueError: If the tokenizer has more tokens than uint16.
        MissingLibraryError: If it is one of Hugging Face, and transformers is not installed.
    """
    encode = _tokenizer(settings.tokenizer)
    parts: dict[str, list[npt.NDArray[Any]]] = {"train.bin": [], "val.bin": []}
    for path in settings.text:
        tokens = encode(path.read_text(encoding="utf-8"))
        end = len(tokens) - round(settings.held_out * len(tokens))
        parts["train.bin"].append(tokens[:end])
        parts["val.bin"].append(tokens[end:])
    settings.output.mkdir(parents=True, exist_ok=True)
    for name, arrays in parts.items():
        np.concatenate(arrays).astype("<u2").tofile(settings.output / name)
    return {name: sum(map(len, arrays)) for name, arrays in parts.items()}


def _tokenizer(name: str) -> Callable[[str], npt.NDArray[Any]]:
    if name == "bytes":
        return lambda text: np.frombuffer(text.encode(), dtype=np.uint8)
    tokenizer = require("transformers").AutoTokenizer.from_pretrained(name)
    if len(tokenizer) > 2**16:
        raise ValueError(f"{name} has {len(tokenizer)} tokens, more than uint16 can number")
    return lambda text: np.array(tokenizer.encode(text), dtype=np.uint16)
