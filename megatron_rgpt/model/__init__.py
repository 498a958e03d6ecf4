"""The model: blocks, modulation, the recurrence, its counts."""
