"""What a user may pass: whatever cannot be meant is refused, by name."""
