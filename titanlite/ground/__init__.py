"""What every package stands on.

errors.py         errors of users, and where they happened
run_files.py      the files that a run leaves in its folder: names, and readers without torch
files.py          files that are written whole or not at all
untrusted.py      the one reader of files that others may have written
torch_private.py  PyTorch's private names
"""
