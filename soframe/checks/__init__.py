"""Checks of user input: invalid values are refused, by the setting's name."""
