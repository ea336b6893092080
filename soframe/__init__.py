"""Second-order optimisation for PyTorch."""

__all__: list[str] = []
