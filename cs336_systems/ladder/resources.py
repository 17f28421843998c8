"""What the compiler made of a step's kernels: registers, spills, shared memory; ahead of time, or of what has just
run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
from triton.compiler import ASTSource, CompiledKernel

from cs336_systems.attention.checks import aot
from cs336_systems.attention.triton.launch import FUSED, options_of
from cs336_systems.attention.triton.tiles import Tiles
from cs336_systems.ladder import kernels as ladder_kernels
from cs336_systems.ladder.launch import configured
from cs336_systems.ladder.steps import EARLIER, HOPPER, Step


@dataclass(frozen=True)
class Resources:
    """Of one kernel (`module.name` where the module is known): registers and spilled bytes per thread, shared memory
    and threads per program, and its PTX."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_threads: int
    ptx: str = ""


# ------------------------------------------------------------------------------------------------ ahead of time
def compile_step(
    step: Step, head_dim: int = 64, capability: int = 90, dtype: str = "bf16"
) -> list[Resources]:
    """Compiles the main kernels of one of the ladder's own steps without a GPU: forward, or those of the passes.

    ValueError for a step of other kernels; triton's own errors where one does not compile for the target.
    """
    if not step.own:
        raise ValueError(
            f"step {step.name!r} runs kernels of {step.launcher}; only the ladder's own are compiled here"
        )
    config, f = step.config, ladder_kernels
    switches = dict(SKIP=config.skip, SPLIT=config.split, EXP2=config.exp2, HEAVY_FIRST=config.heavy_first)
    if step.part == "forward":
        switches |= dict(TMA=config.tma, PERSISTENT=config.persistent > 0)
        return [_compile(f.forward_kernel, config.tiles, switches, head_dim, capability, dtype)]
    out = []
    if not config.one_pass:
        passes = switches | {"FUSE_D": config.fuse_d}
        out.append(_compile(f.queries_kernel, config.tiles, passes, head_dim, capability, dtype))
    passes = switches | {"ONE_PASS": config.one_pass}
    return [*out, _compile(f.keys_kernel, config.key_tiles, passes, head_dim, capability, dtype)]


def _compile(
    function: Any, tiles: Tiles, switches: dict, head_dim: int, capability: int, dtype: str
) -> Resources:
    constants = switches | dict(BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, D=head_dim)
    blocks = {"q": tiles.block_m, "o": tiles.block_m, "k": tiles.block_n, "v": tiles.block_n}
    signature, attributes = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("batch_heads", "n", "scale"):
            signature[name] = "fp32" if name == "scale" else "i32"
        elif switches.get("TMA") and name in blocks:
            signature[name] = f"tensordesc<{dtype}[{blocks[name]}, {head_dim}]>"
        else:
            signature[name] = "*fp32" if name in ("logsumexp", "delta", "dq_sum") else f"*{dtype}"
        if signature[name].startswith("*") or name in ("n", "batch_heads"):  # as launches see them
            attributes[(i,)] = [["tt.divisibility", 16]]
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, places, attributes)
    compiled, registers, spills, _ = aot.compiled_and_reported(source, capability, options_of(tiles))
    threads = 32 * compiled.metadata.num_warps
    return Resources(
        function.__name__, registers, spills, compiled.metadata.shared, threads, compiled.asm["ptx"]
    )


def compile_hopper_step(step: Step, dtype: str = "bf16", *, is_causal: bool = True) -> aot.Compiled:
    """Compiles the main kernel of a step that configures one for Hopper, at a head dimension of 64: one of
    `attention.hopper`'s, or the ladder's.

    `dtype`: bf16 or fp16. ValueError for a step of other kernels.
    """
    if not step.launcher.startswith((HOPPER, EARLIER)) or step.config is None:
        raise ValueError(f"step {step.name!r} configures no kernel for Hopper")
    _, config = configured(step)
    if step.launcher.startswith(HOPPER):
        return aot.compile_hopper_kernel(step.part, 64, dtype, config, is_causal=is_causal)
    from cs336_systems.attention.hopper.configs import GROUP, dq_tile
    from cs336_systems.attention.hopper.launch import KEYS
    from cs336_systems.ladder.hopper_kernels import single_keys_kernel
    from cs336_systems.ladder.hopper_launch import HEAD_DIM, constants_of

    queries, keys, group = (aot.described(dtype, 1, 1, n, HEAD_DIM) for n in (config.block_m, KEYS, GROUP))
    signature = dict(
        q_desc=queries, k_desc=keys, v_desc=group, do_desc=queries, dk_desc=group, dv_desc=group,
        dq_desc=aot.described("fp32", 1, *dq_tile(0, False), swizzled=False),
        stats_desc=aot.described("fp32", 1, config.block_m, swizzled=False), c="fp32", scale="fp32",
    )  # fmt: skip
    constants = dict(IS_CAUSAL=is_causal, D=HEAD_DIM, num_warps=4) | constants_of(config)
    return aot.compile_gluon(single_keys_kernel, signature, constants, FUSED | {"num_warps": 4})


# ------------------------------------------------------------------------------------------------ of what has run
def of_call(call: Callable[[], Any]) -> list[Resources]:
    """The Triton and Gluon kernels that one call launches, in their order, each once. Needs a GPU.
    A kernel that is not found among the compiled ones is left out.

    Triton reports each launch to a hook, by the loaded function; the compiled kernel is the object that holds it.
    """
    functions: list[int] = []

    def note(metadata: Any) -> None:
        if metadata is not None:  # other compilers of Triton kernels may call the hook without
            functions.append(metadata.get()["function"])

    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(note)
    try:
        call()
    finally:
        hook.remove(note)
    kernels = (x for x in gc.get_objects() if type(x) is CompiledKernel)  # isinstance would load lazy objects
    compiled = {kernel.function: kernel for kernel in kernels}
    return [_of_compiled(compiled[f]) for f in dict.fromkeys(functions) if f in compiled]


def _of_compiled(kernel: Any) -> Resources:
    module = getattr(getattr(kernel.src, "fn", None), "__module__", None) or ""
    here = "cs336_systems.attention."
    module = module.removeprefix(here) if module.startswith(here) else module.split(".")[-1]
    name = ".".join(filter(None, [module, kernel.name]))
    # n_spills is the driver's count of 4-byte words of local memory a thread
    return Resources(
        name, kernel.n_regs, 4 * kernel.n_spills, kernel.metadata.shared, 32 * kernel.metadata.num_warps
    )
