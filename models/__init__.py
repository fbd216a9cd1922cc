"""The model zoo: one file per family. attention.py, blocks.py, decoder.py and head.py hold what families share.

Imports torch and models/ only.
"""
