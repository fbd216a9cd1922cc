"""The model zoo: one file per family. attention.py, blocks.py, decoder.py, head.py, rope.py and split.py hold what they share.

Imports torch and models/ only.
"""
