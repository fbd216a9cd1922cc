"""The model zoo: one file per family. What they share is in all_to_all.py, attention.py, blocks.py, decoder.py, exchange.py,
further.py, grouped.py, head.py, moe.py, mup.py, once.py, rope.py, split.py and torch_private.py.

Imports torch and models/ only.
"""
