"""One attention on its own, without a mask: the tensors it holds at each moment, and what its kernels move. In bytes.

Symbols: A = QKᵀ, S = A / sqrt(d), P = softmax(S), O = PV; dX is the gradient of X. Every matrix of scores (A, S, P and
their gradients) has batch_heads · num_queries · num_keys elements, which is what all of this is about.

impl: "reference", plain PyTorch operation by operation (`attention.reference`); "compiled", the same with everything
between the matmuls fused and dA written in P's place, as `torch.compile` does; "flash", kernels that store no
score; "flash_hopper", those of `attention.hopper`, which accumulate dQ in fp32, lengths padded to 64 and d to 64, 128
or 256; "flash_split", those of `attention.hopper.split` for fp32, which split every input into three bf16 pieces,
lengths padded to 128 and d to a power of two.
device: on "cuda" torch computes softmax's gradient with one more matrix, P∘dP; on "cpu" it doesn't.

Only tensors are counted: Q, K, V and dO, which the caller holds all the time, and what is computed from them. A process
holds more (the context, the workspaces of libraries, what an allocator rounds up).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cs336_systems.accounting.hardware import roofline_ms
from cs336_systems.accounting.model import check_choice
from cs336_systems.accounting.operations import attention_bytes, attention_flops, check_sizes, matmul_flops

ATTENTION_IMPLS = ("reference", "compiled", "flash", "flash_hopper", "flash_split")
ATTENTION_DEVICES = ("cuda", "cpu")
_FLASH = ("flash", "flash_hopper", "flash_split")
BEFORE_BACKWARD = "before backward"  # the name of the moment
_FP32_BYTES = 4


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the tensors of one attention."""

    batch_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    bytes_per_element: int

    def __post_init__(self) -> None:
        check_sizes(**vars(self))

    @property
    def matrix(self) -> int:
        """A, S, P or a gradient of one of them."""
        return self.batch_heads * self.num_queries * self.num_keys * self.bytes_per_element

    @property
    def query(self) -> int:
        """Q, O or a gradient of one of them."""
        return self.batch_heads * self.num_queries * self.head_dim * self.bytes_per_element

    @property
    def key(self) -> int:
        """K, V or a gradient of one of them."""
        return self.batch_heads * self.num_keys * self.head_dim * self.bytes_per_element

    @property
    def row(self) -> int:
        """One fp32 number per query: the logsumexp L, or D = rowsum(dO∘O)."""
        return self.batch_heads * self.num_queries * _FP32_BYTES

    @property
    def padded_row(self) -> int:
        """As `row`, in whole tiles of 64 queries, as the kernels for Hopper pad them."""
        return self.batch_heads * self.padded(self.num_queries, 64) * _FP32_BYTES

    @property
    def query_sum(self) -> int:
        """dQ in fp32, padded alike, and to the columns that those kernels compute with."""
        return self.padded_row * self.columns(64)

    def pieces(self, length: int) -> int:
        """Three bf16 pieces of each element of a padded Q, K, V or dO."""
        return self.batch_heads * self.padded(length) * self.columns(16) * 6

    def columns(self, least: int) -> int:
        """The head dimension as a power of two."""
        return max(least, 1 << (self.head_dim - 1).bit_length())

    @staticmethod
    def padded(length: int, tile: int = 128) -> int:
        """Rows in whole tiles."""
        return -(-length // tile) * tile

    @property
    def product_flops(self) -> int:
        return self.batch_heads * matmul_flops(self.num_queries, self.num_keys, self.head_dim)


def _check(impl: str, device: str) -> None:
    check_choice("impl", impl, ATTENTION_IMPLS)
    check_choice("device", device, ATTENTION_DEVICES)


# ----------------------------------------------------------------------------------------------------- memory
def attention_moments(
    batch_heads: int, num_queries: int, num_keys: int, head_dim: int, bytes_per_element: int,
    impl: str = "reference", device: str = "cuda",
) -> dict[str, dict[str, int]]:  # fmt: skip
    """Moment → tensor → bytes: what is alive at each moment of a forward and a backward pass, in their order.

    A moment is named after the operation that has just computed its output and not yet released its inputs. The moment
    `before backward` has nothing but inputs, output and what the graph keeps. ValueError for an unknown `impl` or
    `device`, or a size that is not positive.
    """
    _check(impl, device)
    t = _Sizes(batch_heads, num_queries, num_keys, head_dim, bytes_per_element)
    inputs = {"Q": t.query, "K": t.key, "V": t.key, "dO": t.query}
    out, m = {"O": t.query}, t.matrix
    grads = {"dQ": t.query, "dK": t.key, "dV": t.key}
    if impl in _FLASH:
        kept = inputs | out | {"L": t.row}
        forward, backward = {}, {"D": t.row}
        if impl == "flash_hopper":
            backward = {"L and D, scaled": 2 * t.padded_row, "dQ in fp32": t.query_sum}
        elif impl == "flash_split":
            queries, keys = t.pieces(num_queries), t.pieces(num_keys)
            forward = {"pieces of Q": queries, "pieces of K and V": 2 * keys}
            backward = {"D": batch_heads * t.padded(num_queries) * _FP32_BYTES}
            backward |= {"pieces of Q and dO": 2 * queries, "pieces of K and V": 2 * keys}
        return {"forward": kept | forward, BEFORE_BACKWARD: kept, "backward": kept | backward | grads}
    if impl == "compiled":
        moments = {"A = QKᵀ": {"A": m}, "P from A": {"A": m, "P": m}, "O = PV": {"P": m} | out}
    else:  # the function's own variable holds S until it returns
        moments = {
            "A = QKᵀ": {"A": m},
            "S = A/√d": {"A": m, "S": m},
            "P = softmax(S)": {"S": m, "P": m},
            "O = PV": {"S": m, "P": m} | out,
        }
    moments[BEFORE_BACKWARD] = out | {"P": m}
    begun = out | {"dV": t.key}
    moments["dP = dO Vᵀ"] = begun | {"P": m, "dP": m}
    if impl == "compiled":
        moments["dA from P, dP"] = begun | {"dP": m, "dA": m}
    else:
        extra = {"P∘dP": m} if device == "cuda" else {}
        moments["dS from P, dP"] = begun | {"P": m, "dP": m} | extra | {"dS": m}
        moments["dA = dS/√d"] = begun | {"dS": m, "dA": m}
    moments["dQ = dA K, dK = dAᵀ Q"] = begun | {"dA": m, "dQ": t.query, "dK": t.key}
    if impl == "reference":  # its matmul gives dKᵀ, which becomes K's gradient by a copy
        moments["dK in K's layout"] = out | grads | {"dKᵀ": t.key}
    return {moment: inputs | tensors for moment, tensors in moments.items()}


def attention_peak_bytes(
    batch_heads: int, num_queries: int, num_keys: int, head_dim: int, bytes_per_element: int,
    impl: str = "reference", device: str = "cuda",
) -> int:  # fmt: skip
    """The most bytes alive at any moment of a forward and a backward pass. Errors as for `attention_moments`.

    For plain attention and long sequences it is softmax's gradient: four matrices on a GPU, three on a CPU. No
    schedule that stores P and dP whole can do with fewer than two.
    """
    sizes = (batch_heads, num_queries, num_keys, head_dim, bytes_per_element)
    return max(sum(tensors.values()) for tensors in attention_moments(*sizes, impl, device).values())


# ---------------------------------------------------------------------------------------------------- traffic
@dataclass(frozen=True)
class Kernel:
    """One kernel: the FLOPs of its matmul (0 if it has none), and its least memory traffic in bytes."""

    name: str
    flops: float
    num_bytes: int


def attention_kernels(
    batch_heads: int, num_queries: int, num_keys: int, head_dim: int, bytes_per_element: int, impl: str, part: str,
    device: str = "cuda",
) -> tuple[Kernel, ...]:  # fmt: skip
    """The kernels of one pass in their order; part: "forward" or "backward".

    Each reads its inputs from memory once and writes its outputs once: right where they do not fit in a cache, too
    much where they do. ValueError for an unknown `impl`, `part` or `device`, or a size that is not positive.
    """
    _check(impl, device)
    check_choice("part", part, ("forward", "backward"))
    t = _Sizes(batch_heads, num_queries, num_keys, head_dim, bytes_per_element)
    if impl in _FLASH:
        flops = attention_flops(batch_heads, num_queries, num_keys, head_dim, False, part)
        sizes = (batch_heads, num_queries, num_keys, head_dim, bytes_per_element)
        main = Kernel(part, flops, attention_bytes(*sizes, part))
        if impl == "flash_split":
            queries, keys = t.pieces(num_queries), t.pieces(num_keys)
            delta = batch_heads * t.padded(num_queries) * _FP32_BYTES
            if part == "forward":
                main = Kernel(part, flops, queries + 2 * keys + t.query + t.row)
                return (Kernel("Q, K, V in pieces", 0, t.query + 2 * t.key + queries + 2 * keys), main)
            main = Kernel(part, flops, 2 * queries + 2 * keys + t.row + delta + t.query + 2 * t.key)
            moved = 3 * t.query + 2 * t.key + 2 * queries + 2 * keys + delta
            return (Kernel("Q, K, V, dO in pieces, D", 0, moved), main)
        if impl == "flash" or part == "forward":
            return (main,)
        before = Kernel("D, dQ = 0", 0, 2 * t.query + t.row + 2 * t.padded_row + t.query_sum)
        return (before, main, Kernel("dQ rounded", 0, t.query_sum + t.query))

    def product(
        name: str,
    ) -> Kernel:  # of a matrix, something like Q, and something like K, whichever is the result
        return Kernel(name, t.product_flops, t.matrix + t.query + t.key)

    def elementwise(name: str, matrices: int) -> Kernel:
        return Kernel(name, 0, matrices * t.matrix)

    fused = impl == "compiled"
    if part == "forward":
        between = (
            [elementwise("P from A", 2)]
            if fused
            else [elementwise("S = A/√d", 2), elementwise("P = softmax(S)", 2)]
        )
        return (product("A = QKᵀ"), *between, product("O = PV"))
    if fused:
        between = [elementwise("dA from P, dP", 3)]
    elif device == "cuda":
        between = [elementwise("P∘dP", 3), elementwise("dS from P, P∘dP", 3), elementwise("dA = dS/√d", 2)]
    else:
        between = [elementwise("dS from P, dP", 3), elementwise("dA = dS/√d", 2)]
    ends = (product("dV = Pᵀ dO"), product("dP = dO Vᵀ")), (product("dK = dAᵀ Q"), product("dQ = dA K"))
    return (*ends[0], *between, *ends[1])


def kernels_ms(kernels: Iterable[Kernel], tflops: float, tb_per_s: float) -> float:
    """The least time in ms of kernels that run one after another: each is compute-bound or memory-bound.

    tflops, tb_per_s: the machine's best matmul and best copy. ValueError for one that is not positive.
    """
    return sum(roofline_ms(kernel.flops, kernel.num_bytes, tflops, tb_per_s) for kernel in kernels)
