"""Compiles the Triton kernels ahead of time for any NVIDIA GPU, without having one, and reads what the compiler says.

Used by the compile tests (does each frozen configuration fit its target?) and while tuning (registers and spills of a
candidate). Nothing here runs a kernel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cs336_systems.attention.tiles import Tiles
from cs336_systems.attention.triton_kernels import KERNELS
from cs336_systems.attention.triton_launch import INPUT_PRECISION

PRECISIONS = {
    "bf16": "half",
    "fp16": "half",
    "fp32": "fp32",
    "tf32": "tf32",
}  # dtype → column of the tile table
_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32"}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a kernel: registers a thread, spilled bytes, shared memory in bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_threads: int
    ptx: str


def compile_kernel(
    kernel: str, capability: int, head_dim: int, dtype: str, tiles: Tiles, *, is_causal: bool = True, even: bool = True,
    expanded: int = 0,
) -> Compiled:  # fmt: skip
    """Compiles `kernel` (one of tiles.KERNELS) for compute capability 10·major + minor.

    `dtype`: bf16, fp16, fp32 (accurate to fp32) or tf32. `even`: lengths are multiples of the tiles.
    Raises triton's own errors where the kernel does not compile for the target.
    """
    function = KERNELS[kernel]
    constants = dict(
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=triton.next_power_of_2(head_dim), HEAD_DIM=head_dim,
        IS_CAUSAL=is_causal, EVEN_M=even, EVEN_N=even, EXPANDED=expanded,
        PRECISION=INPUT_PRECISION[PRECISIONS[dtype]],
    )  # fmt: skip
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    constants |= {name: 1 for name in names if name.endswith("_col")}
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("l_ptr", "delta_ptr"):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = f"*{_TYPES[dtype]}"
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        # aligned pointers and row lengths, as launches see them
        if name.endswith(("_ptr", "_row", "_head", "_batch")) and name not in constants:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spills = _ptxas_report(compiled.asm["ptx"], capability)
    return Compiled(registers, spills, compiled.metadata.shared, 32 * tiles.num_warps, compiled.asm["ptx"])


def _ptxas_report(ptx: str, capability: int) -> tuple[int, int]:
    from triton import knobs

    tool = (knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas).path
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE).group(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        out = subprocess.run(
            [tool, "-v", f"-arch={target}", str(file), "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers = int(re.search(r"Used (\d+) registers", out).group(1))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", out))
    return registers, spills
