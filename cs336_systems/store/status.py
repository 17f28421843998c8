"""How the measurement of a case can end other than with numbers: a row that says so, instead of none.

ok, oom               measured; without room for the case is a result too
oom: others held ...  other processes held memory of the GPU when the case ran out of it (`store.measuring`)
skipped: why          this machine cannot run the case
error: what           it failed
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KINDS = ("ok", "oom", "skipped", "error")  # what stands before the colon


def check_status(status: str) -> None:
    """ValueError for a status that is none."""
    if status.partition(":")[0] not in KINDS:
        raise ValueError(f"unknown status {status!r}; allowed: {', '.join(KINDS)}, and a colon with words")


def is_measured(status: str) -> bool:
    """Whether a row says what the case does on its machine, in numbers or for want of memory."""
    return status in ("ok", "oom")


def is_hindered(status: str) -> bool:
    """Whether a row only says what the case lacked when its turn came: it takes no measured one's place."""
    return status.startswith(("skipped", "oom:"))


class Skip(Exception):
    """Raised while measuring a case that this machine cannot run; the message says what it needs."""


def _out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out, on the GPU or the CPU; torch is not imported for it."""
    # cuBLAS, the CUDA runtime and the CPU allocator raise RuntimeErrors with only the text to tell them by
    words = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def loses_context(error: Exception) -> bool:
    """Whether the CUDA context died with this exception: every later call in this process fails as well."""
    if type(error).__name__ in ("LaunchError", "ChildError"):  # that of other processes, which have ended
        return False
    words = ("illegal memory access", "misaligned address", "illegal instruction", "device-side assert")
    fatal = type(error).__name__ == "AcceleratorError" or any(word in str(error) for word in words)
    # what cannot be captured in a CUDA graph only ends the capture
    return fatal and not _out_of_memory(error) and "captur" not in str(error)


@contextmanager
def oom_is_a_row(metrics: dict[str, Any]) -> Iterator[None]:
    """Turns running out of memory, or a `Skip`, into a status of the metrics, and goes on."""
    try:
        yield
    except Skip as skip:
        metrics["status"] = f"skipped: {skip}"
    except Exception as error:
        if not _out_of_memory(error):
            raise
        metrics["status"] = "oom"


@contextmanager
def failure_is_a_row(metrics: dict[str, Any]) -> Iterator[None]:
    """As `oom_is_a_row`, and an error (its traceback printed) becomes the status of one case, so that the others of its
    group are measured. A lost CUDA context comes through: nothing more can be measured in this process.
    """
    try:
        with oom_is_a_row(metrics):
            yield
    except Exception as error:
        if loses_context(error):
            raise
        traceback.print_exc(file=sys.stderr)
        metrics["status"] = error_status(error)


def error_status(error: Exception) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"error: {type(error).__name__}: {first_line}"[:300]
