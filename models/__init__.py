"""The model zoo: one file per family. What they share is in attention.py, blocks.py, decoder.py, exchange.py, grouped.py,
head.py, moe.py, rope.py and split.py.

Imports torch and models/ only.
"""
