"""The process that forks the check and the ranks."""

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE

# A launcher, its fork server, and a function for new processes.
SCRIPT = """
import os, signal, time
from titanlite.launch.fork_server import ForkServer

def sleep():
    print("sleeping", os.getpid(), flush=True)
    os.write(says[1], b"!")
    time.sleep(600)

says = os.pipe()

server = ForkServer("json")
{then}
"""


def run(then: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(then=then)], capture_output=True, text=True, timeout=PATIENCE)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_machine_that_takes_no_more_processes_is_a_message():
    then = """
from titanlite.ground.errors import UserError

server.close()
fork, calls = os.fork, []

def first_only():
    calls.append(1)
    if len(calls) > 1:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = first_only
server = ForkServer("json")
try:
    server.start(sleep)
except UserError as error:
    print(error)
server.close()
"""
    code, text = run(then)
    assert code == 0 and "Resource temporarily unavailable; lower NGPU" in text


def test_closing_the_server_leaves_no_process():
    then = """
child = server.start(sleep)
server.close()
path = f"/proc/{child.pid}/cmdline"  # empty for a zombie that nobody has waited for
while os.path.exists(path) and open(path).read():
    time.sleep(0.01)
"""
    assert run(then)[0] == 0


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_the_launcher(end):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=f"server.start(sleep)\nos.read(says[0], 1)\n{end}")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    output, _ = process.communicate(timeout=PATIENCE)  # returns when the last process that holds the pipe has ended
    assert output.startswith("sleeping ")
