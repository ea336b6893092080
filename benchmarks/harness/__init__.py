"""What the benchmarks share: contenders, networks, step times, races to a target, reports."""
