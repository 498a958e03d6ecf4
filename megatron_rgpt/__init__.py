"""Pretraining of recurrent-depth transformers (RecurrentGPT, arXiv 2608.15062) at scale."""
