"""The guard, loaded; to be imported before torch."""

from benchmarks.fake_gpu.guard import load

GUARD = load()
