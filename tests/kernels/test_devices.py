"""The memory that a step frees is there for the next step."""

import platform
import subprocess
import sys

import pytest

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
