"""What is done to a model, apart from splitting it over ranks; parallel/parallelize.py has the order.

parameters.py             parameters and linear layers by name: patterns of tables, adapters
groups.py                 optimizer.groups: patterns of parameters, frozen ones
meta.py                   a run's model without memory, and its FLOPs
dtypes.py                 names of precisions -> PyTorch's dtypes
lora.py                   low-rank adapters
float8.py                 linear layers that multiply in float8
attention_kernels.py      the kernel of attention
cast.py                   mixed precision for one process
activation_checkpoint.py  what the backward pass recomputes
offload.py                what of that is kept in the host's memory
compile.py                torch.compile
shards.py                 this rank's part of a tensor, and the positions of its values
initialize.py             initial weights by position
"""
