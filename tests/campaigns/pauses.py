"""Pauses random processes of a run at random instants, as a machine with too few cores does, only for longer.

    python -m tests.campaigns.pauses VARIABLE VALUE        those with VARIABLE=VALUE in their environment, until it is ended

What depends on the order in which processes get to run, or on how long they take, shows within minutes. A process that a test
has stopped is left alone, but one that a test stops during a pause goes on after it.
"""

import os
import random
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.guard import marked

_EVERY = 0.1  # seconds between two pauses, on average
# The longest pauses, in seconds, and how often of a hundred: the rarest exceed libraries' limits of five and ten seconds.
_LONGEST = {0.02: 40, 0.1: 30, 0.4: 20, 2.0: 7, 12.0: 3}


def pause_again_and_again(variable: str, value: str, ended: threading.Event) -> None:
    while not ended.wait(random.expovariate(1 / _EVERY)):
        if found := marked(value, variable):
            with suppress(OSError):  # it has ended
                pause(random.choice(found), ended)


def pause(pid: int, ended: threading.Event) -> None:
    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        ended.wait(random.random() * random.choices(list(_LONGEST), list(_LONGEST.values()))[0])
    finally:
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    ended = threading.Event()
    # until the campaign ends, however it does; nothing stays paused
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    pause_again_and_again(*sys.argv[1:3], ended)
