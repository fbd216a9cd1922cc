"""The model zoo: one file per family. What they share is in all_to_all.py, attention.py, blocks.py, decoder.py, exchange.py,
grouped.py, head.py, moe.py, rope.py and split.py.

Imports torch and models/ only.
"""
