"""What devices can do, copies between them and the host, and the memory that a step keeps."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from soframe.kernels import devices

COUNTED = """
import resource, statistics
import torch
from torch import nn
import soframe

torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(30)])
optimizer = soframe.Optimizer(model, "adamw", lr=1e-3)
given = [torch.randn_like(p) for p in model.parameters()]
faults = []
for _ in range(20):
    for parameter, gradient in zip(model.parameters(), given, strict=True):
        parameter.grad = gradient.clone()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    optimizer.zero_grad()
print(statistics.median(faults))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep memory anyway")
def test_a_step_requests_no_memory_anew() -> None:
    """Its updates and states take 6 MB, in 1,500 pages; in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True
    )
    assert float(run.stdout) < 100


CAPABILITIES = {
    (7, 5): False,
    (8, 0): True,  # A100
    (8, 6): False,
    (8, 9): False,
    (9, 0): True,  # H100, H200
    (10, 0): True,  # B200
    (10, 3): False,
    (12, 0): False,
}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_gpus_that_are_fast_in_double_precision(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(devices, "capability", devices.capability.__wrapped__)
    for hip, device, expected in ((None, "cuda", capability), ("6.2", "cuda", (0, 0))):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert devices.capability(torch.device(device)) == expected
        assert devices.capability(torch.device("cpu")) == (0, 0)
        fast = hip is None and CAPABILITIES[capability]
        assert devices.fast_double(torch.device(device)) == fast


@pytest.mark.parametrize("found", [{"avx512_bf16": True}, {"avx512_bf16": False}, {}], ids=str)
def test_processors_that_are_fast_in_half_precision(
    found: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert devices.fast_bfloat16.__wrapped__() == found.get("avx512_bf16", False)


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((7, 2**13, 2**12), [4, 3]),  # 2^25 numbers each, 2^27 at once
        ((7, 2**13, 2**12 + 1), [3, 3, 1]),
        ((2, 2**14, 2**14), [1, 1]),  # each more than a batch
        ((3, 0, 0), [3]),
        ((0, 5, 5), [0]),
    ],
)
def test_a_batch_has_a_gigabyte_in_double_precision(
    shape: tuple[int, ...], lengths: list[int]
) -> None:
    parts = devices.batches(torch.empty(shape, device="meta"))
    assert [len(part) for part in parts] == lengths


class Copies(TorchFunctionMode):
    """Records whether the host waits for copies, none of which is made."""

    def __init__(self) -> None:
        self.waited: list[tuple[Any, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            self.waited.append((args[1], not kwargs["non_blocking"]))
            return args[0]
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_no_copy_to_a_gpu() -> None:
    x, cpu, gpu = torch.ones(2), torch.device("cpu"), torch.device("cuda")
    with Copies() as copies:
        devices.on_device(x, gpu)
        devices.on_device(x, cpu)
        devices.on_host(x)
    assert copies.waited == [(gpu, False), (cpu, True), ("cpu", True)]


def test_numbers_travel_in_the_dtype_of_a_tensor() -> None:
    sent = devices.sent([1.0, 2.5], torch.ones(3, dtype=torch.float64))
    assert sent.dtype == torch.float64
    assert devices.Reading(sent).numbers() == [1.0, 2.5]
    assert devices.along_first(sent, torch.ones(2, 3, 4)).shape == (2, 1, 1)
    assert not devices.on_gpu(sent)
    assert devices.on_gpu(sent.to("meta"))
