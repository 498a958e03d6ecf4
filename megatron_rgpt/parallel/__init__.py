"""Ranks and what they hold: launch, the parameter registry."""
