"""The phases of a step: ranges for profilers, and times."""
