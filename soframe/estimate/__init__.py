"""The making of a curvature: windows of statistics, running averages, solves and their turns."""
