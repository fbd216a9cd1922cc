"""No process or file of a test run outlives it, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import guard
from tests.waiting import until

# As in conftest.py, with a process in a session of its own.
PARENT = f"""
import os, subprocess, sys, time
folder = sys.argv[1]
os.environ |= {{"TMPDIR": folder, {guard.VARIABLE!r}: folder}}
subprocess.Popen([sys.executable, "-S", {guard.__file__!r}, str(os.getpid()), folder, folder], start_new_session=True)
subprocess.Popen(["sleep", "600"], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_processes_and_files_are_removed_after_the_tests(tmp_path, sign):
    folder = tmp_path / "files"
    (folder / "more").mkdir(parents=True)
    parent = subprocess.Popen([sys.executable, "-S", "-c", PARENT, folder], start_new_session=True, stderr=subprocess.DEVNULL)
    until(lambda: len(guard.marked(str(folder))) == 2)
    os.killpg(parent.pid, sign)
    parent.wait()
    until(lambda: not folder.exists() and not guard.marked(str(folder)))
    assert tmp_path.exists()


def test_a_run_of_the_tests_puts_its_files_where_the_guard_removes_them(tmp_path_factory):
    assert os.environ["TMPDIR"].endswith(os.environ[guard.VARIABLE])
    assert Path(os.environ["TMPDIR"]) in tmp_path_factory.getbasetemp().parents
