"""Checkpoint reading: safetensors, tokenizers, and what a load report says."""
