"""Waiting for an event: until it is there, never for a number of seconds in which it should be."""

import time
from collections.abc import Callable
from typing import TypeVar

Event = TypeVar("Event")
# Seconds after which a test counts as hung, below pytest's timeout of 900 for all of it. A loaded machine is slow; a test that
# passes never waits for this.
PATIENCE = 600.0


def until(event: Callable[[], Event], alive: Callable[[], object] = lambda: True, patience: float = PATIENCE) -> Event:
    """Its first value that is true. Fails once `alive` is no longer true, of what the event would come from."""
    end = time.monotonic() + patience
    while not (value := event()):
        # read after the event, which may be the last thing that it did
        assert alive() or event(), "what would do this has ended"
        assert time.monotonic() < end, f"this has not happened in {patience:g} s"
        time.sleep(0.01)
    return value
