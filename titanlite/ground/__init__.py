"""What every package uses.

errors.py         UserError, and the position in a run that reports of errors name
run_files.py      the files that a run leaves in its folder: names, and readers without torch
files.py          files that are written atomically
untrusted.py      the one reader of files that others may have written
torch_private.py  PyTorch's private names
"""
