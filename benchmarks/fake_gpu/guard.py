"""Builds the guard that lets torch believe in a GPU, and loads it before torch: see `guard.cpp`.

It is built with g++ on first use, against the torch that is installed (tried with 2.13), which has
to be one without CUDA.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")


def unavailable() -> str | None:
    """Return why the guard cannot be built here, or None if it can; does not import torch."""
    if sys.platform != "linux":
        return "the fake GPU is built for Linux only"
    if shutil.which("g++") is None:
        return "the fake GPU is built with g++, which is not installed"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this torch has CUDA of its own; the fake GPU needs one without"
    return None


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def load() -> ctypes.CDLL:
    """Load the guard, built unless it has been for this torch."""
    if (reason := unavailable()) is not None:
        raise SystemExit(reason)
    if "torch" in sys.modules:
        raise ImportError("import benchmarks.fake_gpu.counting before torch")
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    path = SOURCE.parent / "__pycache__" / f"guard-{key}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        # Under a name of its own, since another process may build it at the same time.
        built = path.with_suffix(f".{os.getpid()}")
        torch, lib = _torch(), _torch() / "lib"
        options = ["-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}"]
        options += [f"-I{torch / 'include/torch/csrc/api/include'}"]
        linked = [f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
        subprocess.run(["g++", *options, SOURCE, "-o", built, *linked], check=True)
        built.replace(path)
    return ctypes.CDLL(str(path))
