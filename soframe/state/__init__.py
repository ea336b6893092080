"""State: what is saved, loaded and moved."""
