"""Weights to and from Hugging Face's format: config.json and safetensors, never a whole model in one process.

folder.py   what a folder holds: its model, and of each tensor file, shape and dtype, all checked before any is read
load.py     each rank's own slices into a model on any mesh
export.py   a checkpoint as such a folder, a tensor at a time
"""
