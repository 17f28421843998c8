"""A kernel with a barrier of which nothing, or not, makes use; a process that compiles imports it from here."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from cs336_systems.attention.hopper.common import barriers


@gluon.jit
def draw(counter_ptr, out_ptr, USED: gl.constexpr, num_warps: gl.constexpr):
    barrier = barriers(1, 1)
    drawn = gl.atomic_add(counter_ptr, 1)
    if USED:
        mbarrier.arrive(barrier.index(0), count=1)
        mbarrier.wait(barrier.index(0), 0)
    gl.store(out_ptr, drawn)
