"""The attention kernels under NVIDIA's compute-sanitizer: no access outside what they were given, no race."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
needs_tool = pytest.mark.skipif(
    TOOL is None, reason="compute-sanitizer, part of the CUDA toolkit, is not installed"
)
ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\w+)\.py:(\d+)")


def _run(tool: str, *arguments: str) -> str:
    script = Path(__file__).with_name("attention_once.py")
    done = subprocess.run(
        [TOOL, "--tool", tool, sys.executable, str(script), *arguments],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert f"{arguments[0]}: all as in fp64" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def _need_hopper() -> None:
    from cs336_systems.attention import hopper_reason

    if reason := hopper_reason():
        pytest.skip(reason)


@pytest.mark.gpu
@needs_tool
@pytest.mark.parametrize("kernels", ["portable", "hopper"])
def test_memory_is_accessed_where_it_may_be(kernels):
    if kernels == "hopper":
        _need_hopper()
    said = _run("memcheck", kernels)
    assert "ERROR SUMMARY: 0 errors" in said, said[-2000:]


@pytest.mark.gpu
@needs_tool
def test_no_race_but_what_the_tool_sees_in_the_compilers_own_code():
    """What it reports is of the bytes by which `warp_specialize` tells each warp what to run. The compiler writes them
    before a barrier (`BAR.SYNC 1` in the machine code) that all warps pass, and a warp reads its own after it; the tool
    does not take that barrier into account. Accesses of the kernels' own are at other lines."""
    _need_hopper()
    found = set(ACCESS.findall(_run("racecheck", "hopper", "1")))
    assert {(kernel, file, int(line)) for kernel, file, line in found} <= _dispatching()


def test_where_dispatching_code_comes_from():
    """What the test above lets pass: a kernel's first line, and where it says who does what."""
    pytest.importorskip("triton")
    files = {file for _, file, _ in _dispatching()}
    assert files == {"forward", "backward"} and 2 * len(files) <= len(_dispatching()) <= 8


def _dispatching() -> set[tuple[str, str, int]]:
    from cs336_systems.attention.hopper import backward, forward

    found = set()
    for kernel in (forward.forward_kernel, backward.backward_keys_kernel):
        lines, first = inspect.getsourcelines(kernel.fn)
        asked = [first + i for i, line in enumerate(lines) if "gl.warp_specialize(" in line]
        file = Path(inspect.getsourcefile(kernel.fn)).stem
        found |= {(kernel.fn.__name__, file, line) for line in (first, *asked)}
    return found
