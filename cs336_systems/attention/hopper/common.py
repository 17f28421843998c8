"""What the kernels share: copies by names that every version of Gluon has, exponentials, rounding, the order of
programs."""

from __future__ import annotations

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate


@builtin
def _async_atomic_add(tensor_desc, coord, src, _semantic=None):
    """What Gluon 3.8 does under this name. Before, it did not expose the operation of its compiler."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


@builtin
def reinterpreted(memory, dtype, shape, layout, _semantic=None):
    """Shared memory as one of another dtype, shape and layout: a method that Gluon 3.9 renamed."""
    dtype, layout = _unwrap_if_constexpr(dtype), _unwrap_if_constexpr(layout)
    shape = [_unwrap_if_constexpr(n) for n in _unwrap_if_constexpr(shape)]
    return _semantic.memdesc_reinterpret(memory, dtype, shape, layout)


# TMA copies a tile to shared memory, to global memory, and adds one to global memory: names of Gluon 3.8, the only ones
# of 3.9, or what 3.6 and 3.7 have in their place
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
async_atomic_add = getattr(tma, "async_atomic_add", _async_atomic_add)


def aggregate(cls: type) -> type:
    """A class of values that travel together through kernels, by name: members as annotated, given in that order, and
    methods in Gluon. What triton 3.9 makes of such a class; before, one had to write its constructor."""
    types = cls.__annotations__ = typing.get_type_hints(cls)

    def init(self, *members):
        for (name, kind), member in zip(types.items(), members, strict=True):
            constant = kind is gl.constexpr and not isinstance(member, gl.constexpr)
            setattr(self, name, gl.constexpr(member) if constant else member)

    init.__triton_builtin__ = True  # no part of a kernel's source, by which triton knows it again
    cls.__init__ = init
    return _aggregate(cls)


@gluon.jit
def barriers(n: gl.constexpr, arrivals: gl.constexpr):
    """So many mbarriers in shared memory, whose phases are complete after so many arrivals each."""
    memory = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(memory.index(i), count=arrivals)
    return memory


@aggregate
class Ring:
    """The barriers of a ring of STAGES slots. Who fills a slot acquires it, for its t-th use; who reads it waits for
    the t-th, and releases it."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def slot_and_parity(self, t):
        return t % self.STAGES, (t // self.STAGES) & 1

    @gluon.jit
    def acquire(self, t):
        mbarrier.wait(self.empty.index(t % self.STAGES), ((t // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def wait(self, t):
        mbarrier.wait(self.full.index(t % self.STAGES), (t // self.STAGES) & 1)

    @gluon.jit
    def release(self, t):
        mbarrier.arrive(self.empty.index(t % self.STAGES), count=1)

    @gluon.jit
    def skip(self, t):
        """Lets the t-th use go by."""
        self.wait(t)
        self.release(t)


WG = gl.constexpr(64)  # rows of a group: what four warps hold of a wgmma accumulator


@gluon.jit
def first_keys(queries, total, limit):
    """The first key that each query sees, by a window (then it may be below 0) or bounds; of queries past all `total`
    tokens, the last one's."""
    if limit.dtype.is_ptr():
        return gl.load(limit + gl.minimum(queries, total - 1))
    else:
        return queries - limit + 1


@gluon.jit
def query_ends(keys, total, limit):
    """Where the queries that see each key end, by a window (then perhaps past the last one) or bounds."""
    if limit.dtype.is_ptr():
        return gl.load(limit + total + gl.minimum(keys, total - 1))
    else:
        return keys + limit


@gluon.jit
def exp2(x):
    """2^x by the hardware's instruction alone; `exp2` would spend two more on arguments below 2^-126."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


_FROM_BF16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_FROM_FP16 = gl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)


@gluon.jit
def rounded(x, DTYPE: gl.constexpr):
    """fp32 numbers rounded to 16 bits, two per instruction, packed in registers as `widened` reads them."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def widened(x):
    """16-bit numbers in fp32. `to` would unpack pairs into registers of their own, and where numbers are needed
    one by one the compiler also rounds them one by one, in the unit that computes the exponentials."""
    pair: gl.constexpr = _FROM_BF16 if x.dtype == gl.bfloat16 else _FROM_FP16
    return gl.inline_asm_elementwise(pair, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


# Blocks are powers of two: for a head dimension of 80 or 96, too, tiles have D = 128 columns. The matmuls leave out the
# rest. To them there are two parts, 64 columns and REST = 16 or 32 more; or, REST = 0, one part of all D columns.
@gluon.constexpr_function
def mma_layout(width):
    """How the threads of a group hold so many columns of a matmul's result."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def accumulator(WIDTH: gl.constexpr):
    """fp32 zeros, 64 rows of so many columns."""
    return gl.zeros([WG, WIDTH], gl.float32, mma_layout(WIDTH))


@gluon.jit
def accumulators(D: gl.constexpr, REST: gl.constexpr):
    """fp32 zeros, 64 rows of each part's columns."""
    if REST:
        return accumulator(64), accumulator(REST)
    else:
        return (accumulator(D),)


@gluon.jit
def of_part(tile, part):
    """The columns of a tile in shared memory that a part has, as it is or transposed."""
    WIDTH: gl.constexpr = part.shape[1]
    return tile.slice(0 if WIDTH >= 64 else 64, WIDTH, 1)


@gluon.jit
def plus_product(acc, a, b):
    """Issues acc + a b, a in registers."""
    a = gl.convert_layout(a, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def mma_of_part(a, b, part):
    """Issues part += a b, a in registers, of the part's columns of b."""
    return plus_product(part, a, of_part(b, part))


@gluon.constexpr_function
def _rescaling(count):
    """Inline assembly: `count` numbers of a thread times their factors, unless these are 1 for all 16 rows of the warp.
    A thread's numbers are of two rows in turn, two at a time: factors 0 and 2 are all there are."""
    # a vote needs all threads of the warp. LLVM does not know of it, but nothing that calls this diverges within a warp
    factors = [f"${2 * count + i}" for i in range(count)]
    products = " ".join(f"mul.f32 ${i}, ${i}, {factor};" for i, factor in enumerate(factors))
    return (
        "{ .reg .pred any, other; "
        f"setp.neu.f32 any, {factors[0]}, 0f3F800000; setp.neu.f32 other, {factors[2]}, 0f3F800000; "
        f"or.pred any, any, other; vote.sync.any.pred any, any, -1; @!any bra DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _rescaling_operands(count):
    """`count` results, the numbers in the same registers (tied operands), their factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def times_rows(part, factor, OFTEN_ONE: gl.constexpr = False):
    """Each row of a part times its factor. OFTEN_ONE: a warp whose factors are all 1 skips the multiplications."""
    rows: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    factor = gl.convert_layout(factor, rows, assert_trivial=True)[:, None]
    if OFTEN_ONE:
        COUNT: gl.constexpr = part.shape[0] * part.shape[1] // 128  # of a thread
        asm: gl.constexpr = _rescaling(COUNT)
        operands: gl.constexpr = _rescaling_operands(COUNT)
        return gl.inline_asm_elementwise(
            asm, operands, [part, factor], dtype=gl.float32, is_pure=True, pack=COUNT
        )
    else:
        return part * factor


@gluon.jit
def store_parts(parts, tile):
    """All parts to a tile in shared memory."""
    for i in gl.static_range(len(parts)):
        of_part(tile, parts[i]).store(parts[i].to(tile.dtype))


@gluon.jit
def wait_for_both(outstanding: gl.constexpr, parts, other):
    """Waits until at most so many matmuls are outstanding, for the parts and another accumulator."""
    done = warpgroup_mma_wait(outstanding, deps=parts + (other,))  # noqa: RUF005 (triton has no stars)
    return done[:-1], done[-1]


@gluon.jit
def mma_over_columns(a, b, empty, REST: gl.constexpr):
    """Issues a bᵀ, a matmul for each part of the columns that it sums over."""
    if REST:
        first = warpgroup_mma(
            a.slice(0, 64, 1), b.slice(0, 64, 1).permute((1, 0)), empty, use_acc=False, is_async=True
        )
        return warpgroup_mma(a.slice(64, REST, 1), b.slice(64, REST, 1).permute((1, 0)), first, is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def columns_in_registers(tile, layout: gl.constexpr, REST: gl.constexpr):
    """Both parts of a tile in shared memory, or, REST = 0, its first 64 columns, as first operands of matmuls whose
    results have this layout."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    first = tile.slice(0, 64, 1).load(operand)
    if REST:
        return first, tile.slice(64, REST, 1).load(operand)
    else:
        return (first,)


@gluon.jit
def mma_of_columns(a, b, empty):
    """Issues a bᵀ, a being two parts, the first or both in registers."""
    REST: gl.constexpr = a[1].shape[1]
    first = warpgroup_mma(a[0], b.slice(0, 64, 1).permute((1, 0)), empty, use_acc=False, is_async=True)
    return warpgroup_mma(a[1], b.slice(64, REST, 1).permute((1, 0)), first, is_async=True)


@gluon.jit
def locate(number, tiles, batch_heads, section):
    """The (tile, head) of a program's number. Heads come in sections (of `section` heads) whose tensors the L2 cache
    can hold together; within one, tile 0 of all heads first, then tile 1, …"""
    first = number // (tiles * section) * section
    within = number - first * tiles
    width = gl.minimum(section, batch_heads - first)
    return within // width, first + within % width
