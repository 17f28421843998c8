"""Compiles CUDA C++ at first use, with NVRTC, and keeps the machine code on disk.

A kernel's macros decide what it is compiled for (see `tiles.cuh`). Cubins are in `~/.cache/cs336_systems` (or under
XDG_CACHE_HOME), named by a digest of sources, options and NVRTC's version; a process that finds its cubins there needs
the library for its version only. Nothing here needs a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEADERS = ("instructions.cuh", "tiles.cuh")


def missing() -> str | None:
    """Which library is missing for compiling, in a line; None if none is."""
    try:
        if importlib.util.find_spec("cuda.bindings.nvrtc") is None:
            raise ModuleNotFoundError
    except ModuleNotFoundError:  # as find_spec says where there is no package `cuda` at all
        return "cuda-bindings is not installed (pip install 'cs336-systems[cuda]')"
    try:
        version()
    except (RuntimeError, ImportError) as error:
        return f"NVRTC is not found, the package nvidia-cuda-nvrtc has it ({str(error).splitlines()[0]})"
    return None


def too_new() -> str | None:
    """Why the driver would refuse NVRTC's machine code, in a line; None if it takes it. Needs a driver."""
    from cuda.bindings import driver

    number = _checked(driver.cuDriverGetVersion())  # 1000 · major + 10 · minor
    if version()[0] > number // 1000:
        found = ".".join(map(str, version()))
        return (
            f"NVRTC {found} is newer than the driver, which is of CUDA {number // 1000}.{number % 1000 // 10}"
        )
    return None


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's version. RuntimeError where the library is missing."""
    from cuda.bindings import nvrtc

    return _checked(nvrtc.nvrtcVersion())


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a function of the library returned; RuntimeError with its complaint."""
    status, *values = answer
    if int(status):
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def _source(name: str) -> bytes:
    return (HERE / name).read_bytes()


def _options(capability: int, macros: dict[str, int]) -> list[str]:
    defined = [f"-D{name}={int(value)}" for name, value in sorted(macros.items())]
    return [f"-arch=sm_{capability}", "-std=c++17", f"-DCAPABILITY={capability}", *defined]


def compile_file(name: str, capability: int, macros: dict[str, int], *extra: str) -> tuple[bytes, str]:
    """The cubin of a file for compute capability 10 · major + minor, and the compiler's log.

    `extra`: more options of NVRTC. RuntimeError with the log where it does not compile.
    """
    from cuda.bindings import nvrtc

    headers = [_source(header) for header in HEADERS]
    names = [header.encode() for header in HEADERS]
    program = _checked(nvrtc.nvrtcCreateProgram(_source(name), name.encode(), len(names), headers, names))
    try:
        options = [option.encode() for option in [*_options(capability, macros), *extra]]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _filled(nvrtc.nvrtcGetProgramLog, program, _checked(nvrtc.nvrtcGetProgramLogSize(program)))
        log = log.rstrip(b"\0").decode()
        if int(status[0]):
            raise RuntimeError(f"{name} does not compile for sm_{capability}: {log}")
        size = _checked(nvrtc.nvrtcGetCUBINSize(program))
        return _filled(nvrtc.nvrtcGetCUBIN, program, size), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _filled(get: Any, program: Any, size: int) -> bytes:
    """What a function of the library writes into a buffer."""
    buffer = bytes(size + 1)  # the bindings write into it; of one byte Python would share it with others
    _checked(get(program, buffer))
    return buffer[:size]


def cubin(name: str, capability: int, macros: dict[str, int]) -> bytes:
    """As `compile_file`, from the disk where it was compiled before."""
    what = [*_options(capability, macros), str(version())]
    sources = b"".join(_source(file) for file in (*HEADERS, name))
    file = f"{hashlib.sha256(sources + chr(0).join(what).encode()).hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError, RuntimeError):
        found = (folder() / file).read_bytes()
        if hashlib.sha256(found[32:]).digest() == found[:32]:  # a crash may have left a part
            return found[32:]
    code, _ = compile_file(name, capability, macros)
    # no home, or a read-only one: the next process compiles again
    with contextlib.suppress(OSError, RuntimeError):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder()) as place:
            Path(place, file).write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(Path(place, file), folder() / file)
    return code


def folder() -> Path:
    """Where cubins are kept. RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cs336_systems"
