"""Forks of the tiny Llama that are correct on every mesh: `titanlite check-model` must pass each.

docs/reference/family.md describes them.
"""
