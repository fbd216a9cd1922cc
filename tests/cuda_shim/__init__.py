"""A pretended GPU on a machine without one: FakeTensorMode's "cuda" tensors, which have shapes and devices but no values.

    noop_cuda.cpp   what a CPU build of PyTorch lacks of CUDA, in functions that do nothing; build.py compiles it
    pretend.py      torch.cuda of a pretended H100

`pretend.py` imports nothing of titanlite or of other tests. It changes PyTorch for a whole process, and needs LD_PRELOAD, so
that what runs on it is a process of its own.
"""
