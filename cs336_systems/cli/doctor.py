"""What this machine can run, and why the rest is unavailable. Works where torch and triton are not installed.

cs336 doctor
cs336 doctor --json -
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from cs336_systems import __version__, attention
from cs336_systems.accounting import peaks
from cs336_systems.attention.available import hopper_reason, untried_triton
from cs336_systems.attention.cuda.compile import missing, version
from cs336_systems.store import machine


@dataclass(frozen=True)
class Check:
    """One line: whether `name` is available, and what it is, or what it needs."""

    section: str
    name: str
    available: bool
    detail: str


def checks() -> list[Check]:
    """Everything that a chapter may ask of a machine, in the order of reading."""
    torch, why = _torch()
    return [
        Check("software", "cs336_systems", True, __version__),
        Check("software", "python", True, f"{platform.python_version()}, {sys.executable}"),
        Check("software", "torch", torch is not None, torch.__version__ if torch else why),
        _triton(torch),
        _nvrtc(),
        *_gpus(torch),
        *(
            Check("attention", name, reason is None, reason or attention.IMPLEMENTATIONS[name].what)
            for name, reason in _implementations(torch, why).items()
        ),
        _hopper(torch),
        *_backends(torch),
        *_tools(),
    ]


def machine_name() -> str | None:
    """The name under which this machine's rows are kept; None where torch is there but does not import."""
    return machine.machine_name() if _torch()[0] is not None or not machine.has_module("torch") else None


def _torch() -> tuple[ModuleType | None, str]:
    if not machine.has_module("torch"):
        return None, "not installed"
    try:
        import torch
    except (ImportError, OSError) as error:  # a library it links to is missing
        return None, f"installed, but does not import: {error}"
    return torch, ""


def _triton(torch: ModuleType | None) -> Check:
    version = machine.package_version("triton")
    if not machine.has_module("triton"):
        return Check("software", "triton", False, "not installed (it has wheels for Linux)")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Check(
            "software", "triton", True, f"{version}, in its interpreter: right, slow, and never timed"
        )
    if torch is not None and torch.cuda.is_available():
        return Check("software", "triton", True, f"{version}, on the GPU")
    return Check("software", "triton", False, f"{version} without a GPU: TRITON_INTERPRET=1 interprets it")


def _nvrtc() -> Check:
    """What compiles attention in CUDA C++."""
    reason = missing()
    return Check("software", "NVRTC", reason is None, reason or ".".join(map(str, version())))


def _gpus(torch: ModuleType | None) -> Iterator[Check]:
    if torch is None:
        yield Check("hardware", "GPU", False, "needs torch")
    elif not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        )
        yield Check("hardware", "GPU", False, f"torch sees no CUDA device ({built})")
    else:
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            known = "" if peaks(p.name) else "; its data-sheet peaks are not listed"
            detail = f"{p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB{known}"
            yield Check("hardware", f"GPU {i}", True, detail)
    yield Check("hardware", "CPU", True, f"{machine.cpu_cores()} cores")
    nvml = machine.has_module("pynvml")
    gpu = torch is not None and torch.cuda.is_available()
    detail = (
        "SM clock and power are kept with GPU rows" if gpu else "no GPU whose clock and power it could read"
    )
    yield Check("hardware", "NVML", nvml and gpu, detail if nvml else "needs the package nvidia-ml-py")


def _implementations(torch: ModuleType | None, why: str) -> dict[str, str | None]:
    if torch is None:
        return dict.fromkeys(attention.IMPLEMENTATIONS, f"torch: {why}")
    return attention.availability()


def _hopper(torch: ModuleType | None) -> Check:
    reason = "needs torch" if torch is None else hopper_reason()
    if reason and torch is not None and machine.has_module("triton") and reason == untried_triton():
        from cs336_systems.attention.checks.aot import hopper_refused

        refused = hopper_refused()
        reason += f"; {refused}" if refused else "; it compiles them: CS336_HOPPER=1 has them used"
    return Check(
        "attention",
        "flash_triton on Hopper",
        reason is None,
        reason or "kernels in Gluon for 16-bit tensors with d of 40 to 256 (multiples of 8), backward to 128",
    )


def chosen_kernels() -> list[dict[str, str]]:
    """What `attention` launches on this machine's GPU, forward and backward, for some dtypes, head dimensions and
    lengths (16 heads): "hopper", "split" (fp32 on Hopper) or "portable" of `flash_triton`, and both where they differ;
    "CUDA C++" or "plain PyTorch". Empty without a GPU.
    """
    torch, _ = _torch()
    if torch is None or not torch.cuda.is_available():
        return []
    from cs336_systems.attention.auto import before_ampere, chosen

    kernels = {"flash_cuda": lambda *x: {"": "CUDA C++"}, "reference": lambda *x: {"": "plain PyTorch"}}
    if attention.availability()["flash_triton"] is None:
        from cs336_systems.attention.flash_triton import kernels_for

        kernels["flash_triton"] = kernels_for
    rows, half = [], "float16" if before_ampere(0) else "bfloat16"
    for dtype, head_dims in ((half, (32, 64, 80, 128, 256)), ("float32", (64, 128, 256))):
        for head_dim in head_dims:
            row = {"dtype": dtype, "head dim": str(head_dim)}
            for tokens in (128, 512, 2048, 8192):
                x = torch.empty(1, 16, tokens, head_dim, device="cuda", dtype=getattr(torch, dtype))
                found = kernels[chosen(x)](x, x, x)
                row[f"{tokens} tokens"] = ", ".join(dict.fromkeys(found.values()))
            rows.append(row)
    return rows


def _backends(torch: ModuleType | None) -> Iterator[Check]:
    distributed = torch is not None and torch.distributed.is_available()
    gloo = distributed and torch.distributed.is_gloo_available()
    nccl = distributed and torch.distributed.is_nccl_available()
    gpus = torch.cuda.device_count() if torch is not None else 0
    yield Check("parallel", "gloo", gloo, "processes on the CPU" if gloo else "not in this torch")
    if nccl and gpus < 2:
        yield Check("parallel", "nccl", False, f"needs two GPUs; there {'is 1' if gpus == 1 else 'are none'}")
    else:
        yield Check("parallel", "nccl", nccl, f"{gpus} GPUs" if nccl else "not in this torch")


def _tools() -> Iterator[Check]:
    for section, name, commands, purpose in (
        ("tools", "nsys", ("nsys",), "Nsight Systems: timelines of kernels"),
        ("tools", "ncu", ("ncu", "/usr/local/cuda/bin/ncu"), "Nsight Compute: counters of kernels"),
        ("tools", "C++ compiler", ("c++", "g++", "clang++", "cl"), "torch.compile on the CPU"),
        ("tools", "nvcc", ("nvcc",), "CUDA C++"),
        ("book", "xelatex", ("xelatex",), "the PDF"),
        ("book", "latexmk", ("latexmk",), "the PDF"),
    ):
        found = next((path for command in commands if (path := shutil.which(command))), None)
        detail = found or f"no {' or '.join(commands)} on the PATH; wanted for {purpose}"
        yield Check(section, name, found is not None, detail)
    for package in ("jupyter-book", "papermill", "ipykernel"):
        version = machine.package_version(package)
        yield Check("book", package, version is not None, version or "not installed")
