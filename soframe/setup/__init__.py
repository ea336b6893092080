"""What is checked and chosen before the first collective."""
