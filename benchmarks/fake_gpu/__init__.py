"""A GPU that computes nothing: see `counting`."""
