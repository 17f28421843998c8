"""Compiles the kernels ahead of time, without a GPU: those in Triton for any NVIDIA GPU and those in Gluon for Hopper;
and reads what the compiler says.

Used by the compile tests (does each frozen configuration fit its target?) and while tuning (registers and spills of a
candidate). Nothing here runs a kernel.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cs336_systems.attention.machine_code import disassemble, faults, overwritten_operands
from cs336_systems.attention.triton.launch import FUSED, INPUT_PRECISION, KERNELS, options_of
from cs336_systems.attention.triton.tiles import Tiles

if TYPE_CHECKING:
    from cs336_systems.attention.hopper.configs import Forward

PRECISIONS = {
    "bf16": "half",
    "fp16": "half",
    "fp32": "fp32",
    "tf32": "tf32",
}  # dtype → column of the tile table
_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32"}


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


def compile_kernel(
    kernel: str, capability: int, head_dim: int, dtype: str, tiles: Tiles, *, is_causal: bool = True, even: bool = True,
    expanded: int = 0, plain: bool = True, heads_per_kv: int = 1, window: bool = False, packed: bool = False,
    without: str | None = None,
) -> Compiled:  # fmt: skip
    """Compiles `kernel` (one of tiles.KERNELS) for compute capability 10·major + minor.

    `dtype`: bf16, fp16, fp32 (accurate to fp32) or tf32. `even`: lengths are multiples of the tiles. `plain`: strides
    are multiples of 16, and columns lie next to each other. `window`, `packed`: queries see so many keys, or those of
    their document. `without`: "dk" or "dv", where the kernel for keys makes the other one alone.
    Raises triton's own errors where the kernel does not compile for the target.
    """
    function = KERNELS[kernel]
    constants = dict(
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=triton.next_power_of_2(head_dim), HEAD_DIM=head_dim,
        IS_CAUSAL=is_causal, EVEN_M=even, EVEN_N=even, HEADS_PER_KV=heads_per_kv, EXPANDED=expanded,
        PRECISION=INPUT_PRECISION[PRECISIONS[dtype]], SPLITS=1,
    )  # fmt: skip
    constants |= {} if window else {"window": None}
    constants |= {} if packed else {"bounds_ptr": None}
    constants |= {f"{without}_ptr": None} if without else {}
    constants |= {name: 1 for name in function.arg_names if plain and name.endswith("_col")}
    types = {name: f"*{_TYPES[dtype]}" for name in function.arg_names if name.endswith("_ptr")}
    types |= {"l_ptr": "*fp32", "delta_ptr": "*fp32", "bounds_ptr": "*i32"}
    aligned = ("stride_",) if plain else ()
    return compile_source(ASTSource, function, types, constants, options_of(tiles), capability, aligned)


def compile_source(
    source: Any, function: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any],
    capability: int = 90, aligned: tuple[str, ...] = (),
) -> Compiled:  # fmt: skip
    """Compiles a kernel in Triton (source: ASTSource) or Gluon (GluonASTSource).

    types, constants: of its arguments, by name, and perhaps of others. Those in neither are fp32 where they are called
    scale, else integers. aligned: what numbers that are multiples of 16, as launches see them, begin with, besides
    pointers."""
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        other = "fp32" if name in ("scale", "scale_log2") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, other)
        if name not in constants and (name.endswith("_ptr") or name.startswith(aligned)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    places = {(names.index(name),): value for name, value in constants.items()}
    return _compiled(source(function, signature, places, attributes), capability, options)


def _compiled(source: ASTSource, capability: int, options: dict[str, Any]) -> Compiled:
    compiled, registers, spills, serialized = compiled_and_reported(source, capability, options)
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    listing = disassemble(compiled.asm["cubin"]) if "wgmma" in ptx else ""
    return Compiled(
        registers, spills, metadata.shared, 32 * metadata.num_warps, ptx, serialized, tuple(faults(listing, ptx)),
        overwritten_operands(listing)[0],
    )  # fmt: skip


def compile_hopper_kernel(
    kernel: str, head_dim: int, dtype: str, config: Forward | int | None, *, is_causal: bool = True,
    zeroed: bool = True, persistent: bool = True, window: bool = False, packed: bool = False,
) -> Compiled:  # fmt: skip
    """Compiles the `"forward"` or `"backward"` kernel of `hopper` for compute capability 9.0, or that of the backward
    pass of `"few"` queries. `config`: of this one, tiles of 64 queries; of the backward kernel None.

    `dtype`: bf16 or fp16. `head_dim`: 64, 80, 96, 128, 160, 192 or 256, which others are padded to. zeroed: the
    backward kernel finds zeros to add dQ to. persistent: a program of the forward kernel takes many tiles, where it
    can. `window`, `packed`: queries see so many keys, or those of their document.
    """
    from cs336_systems.attention.hopper.backward import backward_keys_kernel
    from cs336_systems.attention.hopper.backward_few import few_queries_kernel
    from cs336_systems.attention.hopper.backward_wide import backward_wide_kernel
    from cs336_systems.attention.hopper.configs import (
        FEW_REGISTERS,
        GROUP,
        columns_of,
        dq_tile,
        padded,
        piece_of,
        rest_of,
    )
    from cs336_systems.attention.hopper.forward import forward_kernel
    from cs336_systems.attention.hopper.forward_alone import alone_kernel
    from cs336_systems.attention.hopper.forward_wide import wide_kernel
    from cs336_systems.attention.hopper.launch import KEYS

    columns, rest, head_dim = columns_of(head_dim), rest_of(head_dim), padded(head_dim)
    constants = dict(
        IS_CAUSAL=is_causal, D=head_dim, REST=rest, COLUMNS=columns, HEADS_PER_KV=1, DO_STEP=1, ZEROED=zeroed,
        TILES=config, num_warps=4,
    )  # fmt: skip
    constants |= {} if window or packed else {"limit": None}
    types = {"limit": "*i32"} if packed else {}
    options = FUSED | {"num_warps": 4}
    if kernel == "forward":
        function = wide_kernel if columns > 128 else alone_kernel if config.alone else forward_kernel
        piece = piece_of(head_dim)
        rows, keys = (described(dtype, 1, 1, n, piece) for n in (GROUP, config.block_n))
        types |= dict(q_desc=rows, k_desc=keys, v_desc=keys, o_desc=rows, l_ptr="*fp32")
        constants |= dict(
            GROUPS=config.groups, BLOCK_N=config.block_n, STAGES=config.stages, OVERLAP=config.overlap, PIECE=piece,
            PERSISTENT=persistent and config.can_persist(columns), HALVE=is_causal and config.halves,
        )  # fmt: skip
        if config.registers:
            options["maxnreg"] = config.registers
    else:
        few, wide = kernel == "few", columns > 128
        function = few_queries_kernel if few else backward_wide_kernel if wide else backward_keys_kernel
        piece = GROUP if wide else head_dim
        rows, keys = (described(dtype, 1, 1, n, piece) for n in (GROUP, GROUP if few or wide else KEYS))
        types |= dict.fromkeys(("q_desc", "v_desc", "do_desc", "dk_desc", "dv_desc"), rows) | dict(
            k_desc=keys, stats_desc=described("fp32", 1, GROUP, swizzled=False), sum_ptr="*fp32", counters_ptr="*i32",
        )  # fmt: skip
        if not wide:
            types["dq_desc"] = described("fp32", 1, *dq_tile(rest, few), swizzled=False)
        if few:
            options["maxnreg"] = FEW_REGISTERS[head_dim][config - 1]
    return compile_gluon(function, types, constants, options)


def described(dtype: str, *block: int, swizzled: bool = True) -> str:
    """The type, in a kernel's signature, of a tensor of bf16, fp16 or fp32 of which TMA copies such blocks."""
    from cs336_systems.attention.hopper.tma import shared_layout

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    return (
        f"tensordesc<{dtype}[{', '.join(map(str, block))}],{shared_layout(block, torch_dtype, swizzled)!r}>"
    )


def compile_gluon(
    function: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> Compiled:
    """Compiles a kernel in Gluon for compute capability 9.0; see `compile_source`."""
    from triton.experimental.gluon._runtime import GluonASTSource

    return compile_source(GluonASTSource, function, types, constants, options)


def hopper_refused() -> str | None:
    """What this version of triton has against the kernels of `hopper`; None where it compiles them well. Takes half a
    minute."""
    try:
        from cs336_systems.attention.hopper.configs import FORWARD, FORWARD_OF_SHORT

        tables = (FORWARD, FORWARD_OF_SHORT, dict.fromkeys((64, 128)), dict.fromkeys((64, 128), 1))
        for kernel, configs in zip(("forward", "forward", "backward", "few"), tables, strict=True):
            for head_dim in (64, 128):
                zeroed = kernel != "backward"  # the kernel of short rows; that of long ones has less to it
                compiled = compile_hopper_kernel(kernel, head_dim, "bf16", configs[head_dim], zeroed=zeroed)
                if compiled.serialized or compiled.faults:
                    return f"in the {kernel} kernel: {(*compiled.faults, 'wgmma is serialized')[0]}"
    except Exception as error:  # whatever a version has changed is a reason, and is shown
        while error.__cause__:  # around it are the places in the kernel that lead there
            error = error.__cause__
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def compile_split_kernel(
    head_dim: int, tiles: Tiles | tuple[Tiles, Tiles], *, is_causal: bool = True, even: bool = True,
    in_turns: bool = False,
) -> Compiled:  # fmt: skip
    """Compiles the forward kernel of `hopper.split`, or, from a pair of tiles, its backward kernel.

    For fp32 on compute capability 9.0; the pair: those of the queries' and of the keys' programs. `head_dim`: a power
    of two of 16 to 128, to which the launchers pad.
    """
    from cs336_systems.attention.hopper import split

    constants = dict(
        D=head_dim, HEAD_DIM=head_dim, IS_CAUSAL=is_causal, EVEN_M=even, EVEN_N=even, HEADS_PER_KV=1, IN_TURNS=in_turns,
    )  # fmt: skip
    if isinstance(tiles, Tiles):
        function, options, m, n = split.forward_kernel, tiles, tiles.block_m, tiles.block_n
        constants |= dict(BLOCK_M=m, BLOCK_N=n)
        rows = dict(q_desc=m, k_desc=n, v_desc=n)
    else:
        function, (by_query, options) = split.backward_kernel, tiles
        m, n, key_m, key_n = by_query.block_m, by_query.block_n, options.block_m, options.block_n
        constants |= dict(QUERY_M=m, QUERY_N=n, KEY_M=key_m, KEY_N=key_n)
        rows = dict(q_desc=m, do_desc=m, k_step_desc=n, v_step_desc=n)
        rows |= dict(k_desc=key_n, v_desc=key_n, q_step_desc=key_m, do_step_desc=key_m)
    names = function.arg_names
    constants |= {name: 1 for name in names if name.endswith("_col")}
    types = {name: "*fp32" for name in names if name.endswith("_ptr")}
    types |= {name: f"tensordesc<bf16[{n}, {head_dim}]>" for name, n in rows.items()}
    return compile_source(
        ASTSource, function, types, constants, options_of(options), aligned=("stride_", "padded")
    )


def compiled_and_reported(
    source: ASTSource, capability: int, options: dict[str, Any]
) -> tuple[Any, int, int, bool]:
    """Triton's compiled kernel, and what its assembler says: registers per thread, spilled bytes, whether wgmma is
    serialized (see `Compiled`). Which assembler, with which options, is for triton to choose, and differs between its
    versions; so it is asked for the report, which it prints only where it finds nothing in its cache."""
    from triton import knobs

    out = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(out):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    report = out.getvalue()
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return compiled, registers, spills, "wgmma.mma_async instructions are serialized" in report
