"""The machine that measures: its name, and the environment that a row refers to.

A machine is named by its hardware (`h100-x1`, `h200-x4`, `cpu-2`), never by its host. Two machines with the
same hardware share a name; what else may differ (driver, torch, triton, CUDA) is spelled out in
`machine.json` under a short digest, the *environment*, that every row carries.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

# Words of a device's marketing name that say nothing about what it can do. Those of slower variants of a chip (PCIe,
# NVL) and of memories of other than the usual size stay: their rows are not one another's.
_NOISE = {"nvidia", "tesla", "geforce", "quadro", "graphics", "gpu", "generation"}
_NOISE |= {"hbm2", "hbm2e", "hbm3", "hbm3e", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "80gb"}

# So much of a GPU the driver and a process itself may take beside what torch's allocator tells (1.3 GiB on an H200).
_DRIVER_GIB = 3.0


def gpu_slug(device_name: str) -> str:
    """A short name for a GPU: "NVIDIA H100 80GB HBM3" → "h100", "NVIDIA H100 PCIe" → "h100-pcie", "NVIDIA GeForce RTX
    4090" → "rtx-4090"."""
    words = re.sub(r"[^a-z0-9 ]+", " ", device_name.lower()).split()
    return "-".join(word for word in words if word not in _NOISE) or "gpu"


def has_module(name: str) -> bool:
    """Whether a top-level module can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def gpu_names() -> list[str]:
    """The CUDA devices that torch sees, by their full names; empty without torch or without a GPU."""
    if not has_module("torch"):
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def cpu_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_nodes() -> int:
    """The machines that measure together: more than one under a torchrun of several nodes (see `launch.team`)."""
    return int(os.environ.get("CS336_NODES") or 1)


@functools.cache
def machine_name() -> str:
    """The name of this machine: `<gpu>-x<count>`, or `cpu-<cores>` where torch sees no GPU.

    Several that measure together are a machine of their own, `<gpu>-x<count of each>-n<nodes>`.
    """
    names = gpu_names()
    name = f"{gpu_slug(names[0])}-x{len(names)}" if names else f"cpu-{cpu_cores()}"
    return f"{name}-n{num_nodes()}" if num_nodes() > 1 else name


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except FileNotFoundError:  # macOS, Windows
        return platform.processor() or platform.machine()
    return platform.machine()


def _driver_versions() -> list[str]:
    """The driver's version, once for each GPU of the machine, also for those that CUDA_VISIBLE_DEVICES hides."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        return [f"unknown ({type(error).__name__})"]
    return out.stdout.strip().splitlines() or ["unknown"]


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def environment() -> dict[str, str | int | float | list[str] | None]:
    """What a measurement on this machine depends on besides the code: hardware, driver, library versions."""
    env: dict[str, str | int | float | list[str] | None] = {
        "cpu": _cpu_model(),
        "cores": cpu_cores(),
        "os": platform.system(),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "triton": package_version("triton"),
    }
    if num_nodes() > 1:
        env["nodes"] = num_nodes()
    names = gpu_names()
    if names:
        import torch

        properties = torch.cuda.get_device_properties(0)
        drivers = _driver_versions()
        if len(drivers) > len(names):  # others may measure on the rest meanwhile, and share the host
            env["gpus_in_machine"] = len(drivers)
        env |= {
            "gpu": names[0],
            "gpus": len(names),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "sms": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": drivers[0].strip(),
            "cuda": torch.version.cuda,
        }
    return env


def environment_digest(env: dict | None = None) -> str:
    """Eight hexadecimal digits that stand for an environment in a row; `machine.json` spells them out."""
    text = json.dumps(environment() if env is None else env, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def free_memory_bytes(device: str) -> int | None:
    """What a device (`"cpu"`, `"cuda"`) has left for new tensors, memory that torch's allocator caches included.

    Of a CPU: of the machine and of the container around this process, what is less; where the system does not say what
    is free (macOS) what there is, and None where it says nothing (Windows).
    """
    if device != "cpu":
        import torch

        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    free = [_free_on_machine(), *_free_in_containers()]
    return min((x for x in free if x is not None), default=None)


def _free_on_machine() -> int | None:
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_containers(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """What is left in each control group around this process that has a limit; files that the kernel caches give way.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    left = []
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            if kinds
            else ("memory.max", "memory.current", "")
        )
        top = root / "memory" if kinds else root
        group = top / path.strip("/")
        for folder in (group, *group.parents):  # inside a container the path may be that outside
            if not folder.is_relative_to(top):
                break
            try:
                limit = (folder / names[0]).read_text().strip()
                used = int((folder / names[1]).read_text())
                told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except OSError:
                continue
            cached = sum(int(told.get(f"{names[2]}{kind}_file", 0)) for kind in ("active", "inactive"))
            if limit != "max":
                left.append(max(0, int(limit) - used + cached))
    return left


def memory_of_others_gib() -> float:
    """The most that other processes hold of a GPU's memory, in GiB; 0 where that is nothing, or NVML cannot tell."""
    if not has_module("pynvml") or not (names := gpu_names()):
        return 0.0
    import pynvml
    import torch

    try:
        used = [torch.cuda.device_memory_used(i) - torch.cuda.memory_reserved(i) for i in range(len(names))]
    except (pynvml.NVMLError, RuntimeError):
        return 0.0
    most = max(used) / 2**30
    return most if most > _DRIVER_GIB else 0.0


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would use for code on a CPU; None where there is none."""
    candidates = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)
