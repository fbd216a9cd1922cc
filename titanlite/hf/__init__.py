"""Imports and exports Hugging Face's format, config.json and safetensors, without a whole model in one process.

folder.py   the tensors of a folder, all validated before any tensor is read
load.py     loads the slices of each rank into a model on any mesh
export.py   writes a checkpoint in this format, one tensor at a time
"""
