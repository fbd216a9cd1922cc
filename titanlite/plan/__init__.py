"""What a run will hold, compute and send, predicted before it starts.

predict.py  the prediction: a few layers are measured, and the others extrapolated
layers.py   which layers are measured, and how many each stands for
step.py     the parts of a step on simulated ranks and fake tensors
record.py   allocations, FLOPs and collectives, as they pass PyTorch's dispatcher
experts.py  the same of the two operations that dispatch and combine tokens
fused.py    which results of operations inductor's kernels write
moments.py  what a rank holds at each moment of a step
pipeline.py the orders of work of a pipeline's ranks, and how long they wait
report.py   the prediction as text, and what it leaves out
shape.py    a model as the matrices that the model of time knows
time.py     the seconds of a step in closed form, on the GPUs of devices.toml
job.py      a configuration as the model of time takes it, and how far the model errs
outlook.py  a run's step time and memory, compared with the prediction after step 20
calibrate.py  the same entry for the machine at hand, measured
timeline.py  a predicted step as events for Perfetto
search.py   the meshes of so many ranks, the best first
memory.py   what a start checks by arithmetic: room for parameters, gradients and optimizer state
"""
