"""The step: from gradients and statistics to updates, phase by phase."""
