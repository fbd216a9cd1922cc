"""A trained model that reads and writes text.

load.py      a checkpoint as a model for inference
generate.py  sampling and scoring with a cache
harness.py   the interface of lm-eval
"""
