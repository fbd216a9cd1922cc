"""What a training run does beside the mathematics of the model; train.py calls it.

step.py        the model, the gradients of a global batch, the update
loss.py        from a batch to the loss
validation.py  loss and samples on text that is not trained on
resume.py      what a run continues from, and which keys may have changed
divergence.py  losses that are not finite, spikes, rollbacks
metrics.py     reports: console, metrics.jsonl, TensorBoard; speed
profiling.py   traces, memory snapshots
memory.py      what holds a rank's memory, and the error when it runs out
remedies.py    ways to save memory, the cheapest first
summary.py     derived values, for the start of the log
checks.py      every fault of a configuration, before a process starts
"""
