"""Solving: when factors become second-order data, and how these reach gradient workers."""
