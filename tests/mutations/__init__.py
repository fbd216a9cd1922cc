"""Sixty one-line faults that the test suite must find (README.md)."""
