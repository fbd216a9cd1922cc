"""A model on many ranks: a file for each dimension, and the order of everything that is done to a model.

mesh.py         degrees -> one DeviceMesh with named dimensions
context.py      context parallelism: sequences split over ranks
tensor.py       tensor and sequence parallelism: what the names of a sharding table mean
fsdp.py         FSDP2 and its replicas
parallelize.py  the ordered list, from a model without memory to one that is ready for its weights
"""
