"""Starts, watches and stops ranks, and writes what a run leaves on the disk.

launcher.py    torchrun with our signals, restarts and stack dumps
local_ranks.py  ranks that a command starts on this machine
process.py     the set-up of a rank: device, process group, timeouts, random seeds, logging
addresses.py   stores and addresses of nodes, checked before torch waits for them
agreement.py   refuses nodes that would train something else
stop.py        a request to stop, agreed by all ranks
failure.py     the report of an unexpected exception, in every command and rank
stacks.py      the stacks of every rank when one fails
children.py    processes that end with their parent
run_folder.py  the run directory: its check, its lock, the record of its starts
"""
