"""Checkpoints: logical tensors by canonical name, whatever the cluster that wrote them."""
