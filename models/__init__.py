"""The model zoo: one file a family, and blocks.py with what several families share. Imports torch and itself, nothing else."""
