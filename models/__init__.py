"""The model zoo, one file a family; blocks.py, attention.py and head.py have what several share. Imports torch and it alone."""
