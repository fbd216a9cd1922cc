"""The comparisons of `titanlite check-model`, `verify` and `replay`. Nothing that trains imports this package.

compare.py     a few steps on a mesh, and how two such runs differ
rounding.py    which differences rounding explains
decisions.py   discrete choices of a forward pass, such as a token's experts, recorded and replayed
table.py       the rows of `check-model`
facts.py       rows without training: tables, constructor, FLOPs, Hugging Face
behavior.py    rows of one forward pass: causality, documents, generation, bfloat16
small_runs.py  rows that train a small model on meshes
whole_runs.py  rows of whole runs: resume, random numbers
coordinates.py the coordinate check of muP
"""
