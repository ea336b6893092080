"""Planning: the cost of placements in time and memory, on this or on described hardware."""
