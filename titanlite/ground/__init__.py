"""What every package stands on.

errors.py         errors of users, and where they happened
files.py          files that are written whole or not at all
untrusted.py      the one reader of files that others may have written
torch_private.py  PyTorch's private names
"""
