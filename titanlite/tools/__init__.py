"""The commands of `titanlite`, one file each."""
