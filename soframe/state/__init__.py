"""State: saving, loading, and moving between placements."""
