"""The model for transformers, and the way of a checkpoint there and back.

The `*_recurrent_gpt.py` files travel with an exported model and import nothing of ours but each other.
"""
