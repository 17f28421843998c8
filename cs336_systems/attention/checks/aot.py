"""Compiles the kernels ahead of time, without a GPU: those in Triton for any NVIDIA GPU and those in Gluon for Hopper;
and reads what the compiler says.

Used by the compile tests (does each frozen configuration fit its target?) and while tuning (registers and spills of a
candidate). Nothing here runs a kernel: launchers are called as for a GPU, and at the launch itself the kernel is
compiled instead, so for just the arguments that a launch has.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cs336_systems.attention.machine_code import disassemble, faults, overwritten_operands
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton.launch import INPUT_PRECISION, KERNELS, First, launch
from cs336_systems.attention.triton.tiles import Tiles

if TYPE_CHECKING:
    from cs336_systems.attention.hopper.configs import Forward

# dtype → column of the tile table
PRECISIONS = {"bf16": "half", "fp16": "half", "fp32": "fp32", "tf32": "tf32"}
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
MULTIPROCESSORS = 132  # an H100's


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a kernel: registers per thread, spilled bytes, shared memory in bytes.

    serialized: whether the assembler serializes the wgmma instructions, which it does where it cannot track the
    registers that hold their results. faults: what else it got wrong (see `machine_code`). register_operands: how many
    wgmma instructions take one of their operands from registers.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_threads: int
    ptx: str
    serialized: bool = False
    faults: tuple[str, ...] = ()
    register_operands: int = 0


class _Gpu:
    """In place of triton's driver: a GPU that nothing runs on. It has a new number whenever it is asked, so that
    nothing has been compiled for it, and never that of a real one."""

    numbers = itertools.count(-1, -1)

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return next(self.numbers)

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(kernel: str, call: Callable[[], Any], capability: int = 90) -> Compiled:
    """What the compiler says of the first kernel of this name that `call` would launch on a GPU of compute capability
    10 · major + minor. The tensors lie on the CPU (`tensors`); other kernels are not compiled.

    Raises triton's own errors where it does not compile for the target, LookupError where there is none of the name.
    Which assembler, with which options, is for triton to choose, and differs between its versions; so it is asked for
    the assembler's report, which it prints only where it finds nothing in its cache."""
    out, found, run = io.StringIO(), [], JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self.__name__ != kernel or found:
            return types.SimpleNamespace(metadata=None)
        with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(out):
            knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
            found.append(run(self, *args, grid=grid, warmup=True, **options))
        return found[0]

    properties = types.SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    with (
        mock.patch.object(driver, "_active", _Gpu(capability)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
    ):
        call()
    again.forget()  # what was not launched
    if not found:
        raise LookupError(f"no kernel {kernel!r} is launched")
    report, ptx, metadata = out.getvalue(), found[0].asm["ptx"], found[0].metadata
    listing = disassemble(found[0].asm["cubin"]) if "wgmma" in ptx else ""
    return Compiled(
        int(re.search(r"Used (\d+) registers", report).group(1)),
        sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)),
        metadata.shared, 32 * metadata.num_warps, ptx, "wgmma.mma_async instructions are serialized" in report,
        tuple(faults(listing, ptx)), overwritten_operands(listing)[0],
    )  # fmt: skip


def tensors(
    dtype: str, head_dim: int, heads: tuple[int, int] = (2, 2), lengths: tuple[int, int] = (1024, 1024),
    plain: bool = True,
) -> list[torch.Tensor]:  # fmt: skip
    """q, k, v, O and L of a pass, and dO, dQ, dK and dV: of `heads` and `lengths` of queries and of keys, never
    written. `plain`: strides are multiples of 16, and columns lie next to each other."""
    width = head_dim if plain else 3 * head_dim + 1

    def like(which: int) -> torch.Tensor:
        made = torch.empty(1, heads[which], lengths[which], width, dtype=_TYPES[dtype])
        return made if plain else made[..., : 3 * head_dim : 3]

    q, k, v, o, do, dq, dk, dv = map(like, (0, 1, 1, 0, 0, 0, 1, 1))
    return [q, k, v, o, torch.empty(1, heads[0], lengths[0]), do, dq, dk, dv]


def compile_kernel(
    kernel: str, capability: int, head_dim: int, dtype: str, tiles: Tiles, *, is_causal: bool = True, even: bool = True,
    expanded: int = 0, plain: bool = True, heads_per_kv: int = 1, window: bool = False, packed: bool = False,
    without: str | None = None,
) -> Compiled:  # fmt: skip
    """Compiles `kernel` (one of tiles.KERNELS).

    `dtype`: bf16, fp16, fp32 (accurate to fp32) or tf32. `even`: lengths are multiples of the tiles. `expanded`: how
    many of dO's last two axes have a stride of zero. `plain`: see `tensors`. `window`, `packed`: queries see so many
    keys, or those of their document. `without`: "dk" or "dv", where the kernel for keys makes the other one alone.
    """
    length = 1024 if even else 1001
    q, k, v, o, logsumexp, do, *rest = tensors(
        dtype, head_dim, (2 * heads_per_kv, 2), (length, length), plain
    )
    do = do[..., : 1 if expanded > 1 else length, : 1 if expanded else head_dim].expand(q.shape)
    gradients = dict(zip(("do", "dq", "dk", "dv"), (do, *rest), strict=True)) if kernel != "forward" else {}
    scratch = {"delta": (tuple(logsumexp.shape), torch.float32)} if gradients else {}
    values = {f"{without}_ptr": None} if without else {}

    def call() -> None:
        first = First(q, k, v, o, logsumexp, is_causal, *_seen(window, packed, length), scratch, **gradients)
        launch(first, kernel, tiles, PRECISION=INPUT_PRECISION[PRECISIONS[dtype]], **values)

    return compiled(KERNELS[kernel].__name__, call, capability)


def compile_hopper_kernel(
    kernel: str, head_dim: int, dtype: str, config: Forward | int | None, *, is_causal: bool = True,
    zeroed: bool = True, persistent: bool = True, window: bool = False, packed: bool = False,
) -> Compiled:  # fmt: skip
    """Compiles the `"forward"` or `"backward"` kernel of `hopper` for compute capability 9.0, or that of the backward
    pass of `"few"` queries. `config`: of this one, tiles of 64 queries; of the backward kernel None.

    `dtype`: bf16 or fp16. zeroed: the backward kernel finds zeros to add dQ to. persistent: with a causal mask, a
    program of the forward kernel takes many tiles, where it can. `window`, `packed`: queries see so many keys, or those
    of their document.
    """
    from cs336_systems.attention.hopper import launch as hopper

    heads, lengths = 2, (4096, 4096) if zeroed else (256, 256)
    if kernel == "few":
        lengths = 64 * config, 512
    elif kernel == "forward" and persistent:  # every multiprocessor has as many pairs of tiles as the others
        heads, lengths = 2 * MULTIPROCESSORS, (128 * config.groups, 128 * config.groups)
    made = tensors(dtype, head_dim, (heads, heads), lengths)
    seen = _seen(window, packed, lengths[1])

    def forward() -> None:
        hopper.first_forward(*made[:5], is_causal, config, *seen)

    def backward() -> None:
        hopper.first_backward(*made, is_causal, None, *seen)

    if kernel == "forward":
        name = "wide" if head_dim > 128 else "alone" if config.alone else "forward"
        return compiled(f"{name}_kernel", forward)
    name = "few_queries" if kernel == "few" else "backward_wide" if head_dim > 128 else "backward_keys"
    return compiled(f"{name}_kernel", backward)


def compile_split_kernel(
    head_dim: int, tiles: Tiles | tuple[Tiles, Tiles], *, is_causal: bool = True, even: bool = True,
    in_turns: bool = False,
) -> Compiled:  # fmt: skip
    """Compiles the forward kernel of `hopper.split`, or, from a pair of tiles, its backward kernel.

    For fp32 on compute capability 9.0; the pair: those of the queries' and of the keys' programs.
    """
    from cs336_systems.attention.hopper import split_launch

    q, k, v, *rest = tensors("fp32", head_dim, lengths=(1024, 1024) if even else (1001, 1001))

    def call() -> None:
        if isinstance(tiles, Tiles):
            split_launch.first_forward(q, k, v, *rest[:2], is_causal, tiles)
        else:
            split_launch.first_backward(q, k, v, *rest, is_causal, tiles)

    name = "forward_kernel" if isinstance(tiles, Tiles) else "backward_kernel"
    # programs are few by the number of multiprocessors
    with mock.patch.object(split_launch, "_multiprocessors", lambda device: 10**6 if in_turns else 1):
        return compiled(name, call)


def _seen(window: bool, packed: bool, length: int) -> tuple[int | None, torch.Tensor | None]:
    """A window, and where documents begin, as launchers take them."""
    return 100 if window else None, torch.tensor([0, length // 2, length]).int() if packed else None


def hopper_refused() -> str | None:
    """What this version of triton has against the kernels of `hopper`; None where it compiles them well. Takes half a
    minute."""
    try:
        from cs336_systems.attention.hopper.configs import FORWARD, FORWARD_OF_SHORT

        tables = (FORWARD, FORWARD_OF_SHORT, dict.fromkeys((64, 128)), dict.fromkeys((64, 128), 1))
        for kernel, configs in zip(("forward", "forward", "backward", "few"), tables, strict=True):
            for head_dim in (64, 128):
                zeroed = kernel != "backward"  # the kernel of short rows; that of long ones has less to it
                found = compile_hopper_kernel(kernel, head_dim, "bf16", configs[head_dim], zeroed=zeroed)
                if found.serialized or found.faults:
                    return f"in the {kernel} kernel: {(*found.faults, 'wgmma is serialized')[0]}"
    except Exception as error:  # whatever a version has changed is a reason, and is shown
        while error.__cause__:  # around it are the places in the kernel that lead there
            error = error.__cause__
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None
