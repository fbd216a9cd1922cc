"""Inference with a trained model: sampling and scoring with a KV cache."""
