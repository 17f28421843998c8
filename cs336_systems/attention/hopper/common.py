"""What the kernels of both passes share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WG = gl.constexpr(64)  # rows of a group: what four warps hold of a wgmma accumulator


@gluon.jit
def exp2(x):
    """2^x by the hardware's instruction alone; `exp2` would spend two more on arguments below 2^-126."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def place(program, tiles, batch_heads, section):
    """The program's (tile, head). Heads come in sections (of `section` heads) whose tensors the L2 cache can hold
    together; within one, tile 0 of all heads first, then tile 1, …"""
    first = program // (tiles * section) * section
    within = program - first * tiles
    width = gl.minimum(section, batch_heads - first)
    return within // width, first + within % width
