"""Products with a curvature, its fit to data, and the gradients of single samples."""
