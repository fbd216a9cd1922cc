"""A model on many ranks: a file for each dimension, and the order of everything that is done to a model.

mesh.py         degrees -> one DeviceMesh with named dimensions
context.py      context parallelism: sequences split over ranks
tensor.py       tensor and sequence parallelism: what the names of a sharding table mean
expert.py       expert parallelism: experts split over ranks
pipeline.py     pipeline parallelism: blocks cut into stages
dataflow.py     what the stages send, found by a trace
late_stage.py   PyTorch's stage, with buffers and a loss at the time that they are needed
fsdp.py         FSDP2 and its replicas
parallelize.py  the ordered list, from a model without memory to one that is ready for its weights
"""
