"""Training runs that compare optimizers: workloads, settings, tuning, records, tables and plots.

Not in the wheel: `python -m experiments` in a checkout; the scripts in `benchmarks/` import it.
"""
