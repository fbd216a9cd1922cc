"""Forks of the tiny Llama with one fault each, which `titanlite check-model` must name."""
