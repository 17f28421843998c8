"""The attention kernels under NVIDIA's compute-sanitizer: no access outside what they were given, no race."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attention_once import OF, SHAPES

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
needs_tool = pytest.mark.skipif(
    TOOL is None, reason="compute-sanitizer, part of the CUDA toolkit, is not installed"
)
ROOT = Path(__file__).resolve().parents[1]
ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\w+)\.py:(\d+)")


def _run(tool: str, *arguments: str) -> str:
    script = Path(__file__).with_name("attention_once.py")
    done = subprocess.run(
        # a call that the driver refuses is no access to memory
        [TOOL, "--tool", tool, *["--report-api-errors=no"] * (tool == "memcheck"), sys.executable, str(script),
         *arguments],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert f"{arguments[0]}: all as in fp64" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def _need(kernels: str) -> None:
    from cs336_systems.attention.available import cuda_reason, hopper_reason, triton_reason

    of = {"portable": triton_reason, "cuda": cuda_reason, "turing": cuda_reason}
    if reason := of.get(kernels, hopper_reason)():
        pytest.skip(reason)


@pytest.mark.gpu
@needs_tool
@pytest.mark.parametrize(("kernels", "d"), [(kernels, d) for kernels, (dims, _) in OF.items() for d in dims])
def test_memory_is_accessed_where_it_may_be(kernels, d):
    _need(kernels)
    said = _run("memcheck", kernels, str(len(SHAPES)), str(d))
    assert "ERROR SUMMARY: 0 errors" in said, said[-2000:]


@pytest.mark.gpu
@needs_tool
@pytest.mark.parametrize("d", OF["hopper"][0])
def test_no_race_but_what_the_tool_sees_in_the_compilers_own_code(d):
    """What it reports is of the bytes by which `warp_specialize` tells each warp what to run. The compiler writes them
    before a barrier (`BAR.SYNC 1` in the machine code) that all warps pass, and a warp reads its own after it; the tool
    does not take that barrier into account. Nor does it an mbarrier: the producer's warp of the backward kernel stores
    the number of a tile of keys before it arrives at one, and the groups load it after they have waited there; so it is
    with dS of the one for wide heads. Other accesses of the kernels' own are at other lines."""
    _need("hopper")
    said = _run("racecheck", "hopper", "1", str(d))
    assert "RACECHECK SUMMARY" in said
    found = ACCESS.findall(said)
    assert len(found) >= 2 * said.count("Race reported"), "reports are not understood"
    assert {(kernel, file, int(line)) for kernel, file, line in found} <= _dispatching() | _handing_over()


@pytest.mark.gpu
@needs_tool
@pytest.mark.parametrize("kernels", ["cuda", "turing"])
def test_no_race_in_cuda(kernels):
    _need(kernels)
    said = _run("racecheck", kernels, "1")
    assert "RACECHECK SUMMARY: 0 hazards" in said, said[-2000:]


def test_where_dispatching_code_comes_from():
    """What the test above lets pass: where a kernel begins, and where it says who does what. No tile is read there."""
    pytest.importorskip("triton")
    lines = {}
    for kernel, file, line in _dispatching():
        text = (ROOT / f"cs336_systems/attention/hopper/{file}.py").read_text().splitlines()[line - 1]
        lines.setdefault(kernel, set()).add(text.split()[0].partition("(")[0])
    starts = {"def", "if", "elif", "else:", "gl.warp_specialize"}
    assert set.union(*lines.values()) <= starts
    assert all({"def", "gl.warp_specialize"} <= found for found in lines.values())


def _handing_over() -> set[tuple[str, str, int]]:
    """(kernel, file, line) where the number of a tile, and dS, are stored and loaded."""
    found = set()
    for kernel, file, access in (
        ("backward_keys_kernel", "backward", r"\bdrawn\.index\(slot\)\.(load|store)\("),
        ("backward_keys_kernel", "backward_state", r"\bdrawn\.index\(slot\)\.(load|store)\("),
        ("backward_wide_kernel", "backward_wide", r"\bself\.tile\.store\(|\.ds\.tile\..*\.load\("),
    ):
        text = (ROOT / f"cs336_systems/attention/hopper/{file}.py").read_text().splitlines()
        found |= {(kernel, file, n) for n, line in enumerate(text, 1) if re.search(access, line)}
    assert len(found) == 5
    return found


def _dispatching() -> set[tuple[str, str, int]]:
    """(kernel, file, line) of each kernel's `def`, its calls of `warp_specialize`, and the conditions around them."""
    found = set()
    for kernel, file in (
        ("forward_kernel", "forward"), ("wide_kernel", "forward_wide"), ("backward_keys_kernel", "backward"),
        ("backward_wide_kernel", "backward_wide"),
    ):  # fmt: skip
        tree = ast.parse((ROOT / f"cs336_systems/attention/hopper/{file}.py").read_text())
        [function] = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == kernel]
        found.add((kernel, file, function.lineno))
        for node in function.body:
            calls = [
                x
                for x in ast.walk(node)
                if isinstance(x, ast.Call) and "warp_specialize" in ast.unparse(x.func)
            ]
            conditions = [x for x in ast.walk(node) if isinstance(x, ast.If)] if calls else []
            found |= {(kernel, file, x.lineno) for x in (*calls, *conditions)}
    return found
