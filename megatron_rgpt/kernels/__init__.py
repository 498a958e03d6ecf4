"""Fused operations, each beside its plain-torch twin."""
