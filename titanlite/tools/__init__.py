"""The commands of `titanlite`, one file each, and what only they use, such as the interface to lm-eval."""
