"""Which phase of a step a rank is in: ranges for profilers, and times."""
