"""What a curvature is made with: windows of statistics, running averages, solves, their turns."""
