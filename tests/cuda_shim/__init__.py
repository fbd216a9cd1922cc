"""A simulated GPU on a machine without one: FakeTensorMode's "cuda" tensors, which have shapes and devices but no values.

    noop_cuda.cpp   CUDA functions that a CPU build of PyTorch lacks, which do nothing; build.py compiles it
    pretend.py      torch.cuda of a simulated H100
    watch.py        what operations would do to a real GPU: a host sync, a pageable copy, float64, no CUDA kernel
    cells.py        the configurations that run
    program.py      a run of titanlite, as train.py calls its functions, in a process with many cells
    planted.py      faults that the program must find
    inductor.py     inductor and Triton on it, down to machine code; kernels.py makes a table of the kernels, kernels_sm90.md

`pretend.py` and `watch.py` import nothing of titanlite or of other tests. They change PyTorch for the whole process and need
LD_PRELOAD, so whatever uses them runs in a process of its own.
"""
