"""launch/children.py: how workers are started; that they end with their parent, tests/end_to_end show."""

import multiprocessing.forkserver
import os
import signal
import tempfile
import threading

import pytest

from titanlite.ground.errors import UserError
from titanlite.launch.children import naming_long_folder, starting


def test_a_signal_that_arrives_while_workers_start_is_handled_when_they_have_started():
    """Another thread, such as a library's, receives it: Python would run the handler of the main thread in mid-start."""
    ended, started = threading.Event(), False
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    other = threading.Thread(target=ended.wait)
    other.start()
    wakeup, theirs = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(theirs)  # written to when the signal has arrived, before a handler runs
    try:
        with pytest.raises(KeyboardInterrupt), starting({signal.SIGINT}):
            os.kill(os.getpid(), signal.SIGINT)
            while not _read(wakeup):
                other.join(0.001)
            started = True
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        other.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(wakeup)
        os.close(theirs)
    assert started


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 16)
    except BlockingIOError:
        return b""


def test_a_folder_for_temporary_files_that_is_too_long_for_a_socket_is_named(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(folder))  # which it keeps
    server = multiprocessing.forkserver.ForkServer()
    with pytest.raises(UserError, match=f"TMPDIR={folder}: is too long"), naming_long_folder():
        server.ensure_running()
    with pytest.raises(OSError, match="another"), naming_long_folder():
        raise OSError("another")
