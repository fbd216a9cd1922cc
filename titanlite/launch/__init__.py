"""Processes: how ranks are started, watched and stopped, and what they leave on the disk.

launcher.py    torchrun with our signals, restarts and stack dumps
local_ranks.py  ranks that a command starts on this machine
process.py     this rank among the others: device, process group, timeouts, random seeds, logging
addresses.py   stores at addresses, probed before anything waits for them
agreement.py   whether all nodes are about to train the same
stop.py        a request to stop, agreed by all ranks
failure.py     the report of an exception that nobody has foreseen, in every command and rank
stacks.py      the stacks of every rank when one fails
children.py    processes that end with their parent
run_folder.py  every name that a run writes in its directory, its lock, the record of its starts
"""
