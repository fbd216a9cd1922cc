"""launch/children.py: how workers are started; that they end with their parent, tests/end_to_end show."""

import os
import signal
import threading

import pytest

from titanlite.launch.children import starting


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
