"""Forks of the tiny Llama that are right on every mesh: `titanlite check-model` must pass each.

docs/reference/family.md describes them.
"""
