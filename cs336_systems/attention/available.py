"""Why kernels in Triton, those for Hopper, or those in CUDA C++ cannot run on this machine. Importing this needs no
torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re

# the first and last triton that `make test-versions` compiles the kernels for Hopper with
TRIED = ((3, 6), (3, 9))


def torch_reason() -> str | None:
    """Why nothing here can run; None where torch is installed."""
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def triton_reason() -> str | None:
    """Why `flash_triton` cannot run on this machine; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it has wheels for Linux)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    import torch

    from cs336_systems.attention.triton.tiles import OLDEST

    if not torch.cuda.is_available():
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    return _gpu_reason(OLDEST)


def cuda_reason() -> str | None:
    """Why `flash_cuda` cannot run on this machine; None where it can."""
    from cs336_systems.attention.cuda.compile import missing, too_new
    from cs336_systems.attention.cuda.tables import OLDEST

    return _gpu_reason(OLDEST) or missing() or too_new()


def _gpu_reason(oldest: int) -> str | None:
    """Why kernels for NVIDIA GPUs from a compute capability on, 10 · major + minor, cannot run; None where they can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip:
        return "the kernels are written for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < oldest:
        return f"compute capability {major}.{minor} is older than {oldest / 10}"
    return None


def hopper_reason(device_index: int = 0) -> str | None:
    """Why the kernels of `flash_triton` that are written for Hopper are not used on a CUDA device; None where they are.

    There they take 16-bit tensors that TMA can read, with head dimensions of 40 to 256 (of windows and packed
    documents to 128) that are multiples of 8 and with 64 queries and keys or more, backward also fewer queries if
    keys are at least four times as many (`hopper.launch`: `reason_against`, `serves`), and fp32 tensors with head
    dimensions up to 128 and 512 queries and keys or more whose matmuls have to be accurate to fp32
    (`hopper.split_launch`: `serves`), unless so few programs of the portable kernels are needed that these are
    faster: in 16 bits backward, with no more keys than queries, and in fp32 forward. In the environment, set before
    the first call, `CS336_HOPPER=0` turns them off, and 1 has them used with an untried triton as well. ValueError
    for another value than 0 or 1.
    """
    asked = os.environ.get("CS336_HOPPER", "1")
    if asked not in ("0", "1"):
        raise ValueError(f"CS336_HOPPER={asked!r}; allowed: 0, 1")
    if reason := hopper_unable(device_index):
        return reason
    return "CS336_HOPPER=0 turns them off" if asked == "0" else None


def hopper_unable(device_index: int = 0) -> str | None:
    """Why a CUDA device cannot run the kernels for Hopper, asked for or not; None where it can."""
    if reason := triton_reason():
        return reason
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted"
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) != (9, 0):
        return f"compute capability {major}.{minor}: they are written for 9.0"
    if (reason := untried_triton()) and os.environ.get("CS336_HOPPER") != "1":
        return reason
    import triton

    try:
        for launcher in ("launch", "split_launch"):
            importlib.import_module(f"cs336_systems.attention.hopper.{launcher}")
    except (ImportError, AttributeError) as error:  # they need parts of triton that it does not promise
        return f"triton {triton.__version__}: {error}"
    return None


def untried_triton() -> str | None:
    """The version of triton, where the kernels for Hopper were not tried with it: Gluon changes from one to the next,
    and kernels are launched again by parts of triton that are not public."""
    import triton

    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if TRIED[0] <= version <= TRIED[1]:
        return None
    first, last = (".".join(map(str, x)) for x in TRIED)
    return f"triton {triton.__version__}: tried with {first} to {last}"
