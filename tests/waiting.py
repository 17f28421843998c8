"""What tests of processes wait for."""

import os
import time
from pathlib import Path


def running(pid):
    """Whether there is a process of this number that has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not os.path.isdir("/proc/1")  # it ended meanwhile; or there is no /proc
    return state != "Z"  # a zombie has ended


def wait_until(condition, seconds):
    """Waits for a condition to hold, and fails where it does not within so many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()
