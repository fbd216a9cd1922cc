"""Optimizers, their state, the learning rate and the loss scale.

build.py           the optimizer of a configuration; clipping by the global norm
state.py           its state: named for checkpoints, counted in bytes
adam_bf16.py       Adam and AdamW for bfloat16 parameters
muon.py            Muon
own.py             a class of the user's own
whole_matrices.py  functions of whole matrices, computed by the ranks in turn
rounding.py        stochastic rounding and remainders
lr_schedule.py     the learning rate as a formula of the step
loss_scale.py      for float16
"""
