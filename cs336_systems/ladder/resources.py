"""What the compiler made of a step's kernels: registers, spills, shared memory; ahead of time, or of what has just
run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
from triton.compiler import CompiledKernel

from cs336_systems.attention.checks import aot
from cs336_systems.ladder.launch import configured
from cs336_systems.ladder.steps import EARLIER, WORK, Step


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
    step: Step, dtype: str = "bf16", *, capability: int = 90, is_causal: bool = True
) -> list[aot.Compiled]:
    """Compiles the main kernels of a step without a GPU, for the leaderboard's head dimension: one, or of a backward
    pass in two those of both. ValueError for a step that configures no kernel; triton's own errors where one does not
    compile for the target."""
    launch, config = configured(step)
    if config is None:
        raise ValueError(f"step {step.name!r} configures no kernel: {step.launcher} chooses")
    made = aot.tensors(dtype, WORK["head_dim"])
    given = made[:3] if step.part == "forward" else made[:6]
    return [
        aot.compiled(name, lambda: launch(*given, is_causal, config), capability)
        for name in _main_kernels(step)
    ]


def _main_kernels(step: Step) -> tuple[str, ...]:
    if step.part == "forward":
        return ("forward_kernel",)
    if not step.own:
        return ("single_keys_kernel" if step.launcher.startswith(EARLIER) else "backward_keys_kernel",)
    return ("keys_kernel",) if step.config.one_pass else ("queries_kernel", "keys_kernel")


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
