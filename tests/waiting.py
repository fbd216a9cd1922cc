"""Waiting for an event: until it happens, never for a fixed number of seconds."""

import time
from collections.abc import Callable
from typing import TypeVar

Event = TypeVar("Event")
# Seconds after which a test counts as hung, below pytest's timeout of 900 for the whole test. A loaded machine is slow; a
# passing test never waits this long.
PATIENCE = 600.0


def until(event: Callable[[], Event], alive: Callable[[], object] = lambda: True, patience: float = PATIENCE) -> Event:
    """The first true value of `event`. Fails once `alive`, of the event's source, is no longer true."""
    end = time.monotonic() + patience
    while not (value := event()):
        # read after the event, which may be the last action of its source
        assert alive() or event(), "what would do this has ended"
        assert time.monotonic() < end, f"this has not happened in {patience:g} s"
        time.sleep(0.01)
    return value
