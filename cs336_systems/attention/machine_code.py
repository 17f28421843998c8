"""Reads the machine code of Triton's kernels for Hopper, to refuse what the assembler got wrong.

ptxas 12.8, which comes with triton 3.6 and 3.7, now and then forgets to copy the address of a tile in shared memory to
the registers that it makes a wgmma instruction's descriptor from. The product then reads other rows, or memory that is
not there. That happened to kernels with many values to keep, on tensors whose rows have odd lengths or odd strides, and
depends on every stride: no test can meet all of them. It can be seen, though: on some way through the kernel a
descriptor is made from a register to which nothing has been written. `unset_descriptors` looks for those.

Sources: the listing of `nvdisasm` (CUDA Binary Utilities, instruction set of Hopper); of the same family are the faults
reported in triton's issues 10486 and 11366.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
import warnings
from typing import Any

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_REGISTER = re.compile(r"\bUR(\d+)")
_PREDICATE = re.compile(r"^!?U?P\d")
# A-operand from registers: the descriptor is B's, in the second pair of the four
_ONE_DESCRIPTOR = re.compile(r"^R\d+\S*, R\d+")


def _set(first: int, count: int) -> int:
    """A set of uniform registers, one bit each."""
    return ((1 << count) - 1) << first


def _effect(name: str, operands: str) -> tuple[int, int]:
    """The uniform registers that an instruction writes and reads."""
    written = read = 0
    first, _, rest = operands.partition(",")
    kinds = name.split(".")
    pair = 2 if "64" in kinds or "WIDE" in kinds else 1
    # what writes a uniform register names it first; a store may name one first that it only reads, in brackets
    if found := re.match(r"UR(\d+)$", first):
        written = _set(int(found[1]), pair)
    else:
        rest = operands
    for place, operand in enumerate(rest.split(",")):
        for found in _REGISTER.finditer(operand):
            at, last = int(found[1]), place == rest.count(",")
            if "gdesc[" in operand:
                read |= _set(at + 2, 2) if _ONE_DESCRIPTOR.match(operands) else _set(at, 4)
            elif "desc[" in operand or (kinds[0] == "UIADD3" and "64" in kinds) or ("WIDE" in kinds and last):
                read |= _set(at, 2)
            else:
                read |= _set(at, 1)
    return written, read


def unset_descriptors(listing: str) -> list[str]:
    """The wgmma instructions of a kernel, as `nvdisasm -c` lists it, with a descriptor in uniform registers to which on
    some way there nothing has been written, or what was computed from such a register."""
    instructions: list[tuple[str | None, str, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            instructions.append((found[1], found[2], found[3]))
    effects = [_effect(name, operands) for _, name, operands in instructions]
    # the registers with a value on every way to an instruction: the intersection over the instructions before it
    before: list[int | None] = [None] * len(instructions)
    waiting = [(0, 0)] if instructions else []
    while waiting:
        at, known = waiting.pop()
        while at < len(instructions):
            settled = before[at]
            known = known if settled is None else known & settled
            if known == settled:
                break
            before[at] = known
            written, read = effects[at]
            known = known & ~written if read & ~known else known | written
            predicate, name, operands = instructions[at]
            kind, always = name.split(".")[0], predicate is None and not _PREDICATE.match(operands)
            if (
                kind in ("BRA", "CALL")
                and (found := re.search(r"\.L_x_\d+", operands))
                and found[0] in labels
            ):
                waiting.append((labels[found[0]], known))
            if kind in ("BRA", "EXIT", "RET") and always:
                break
            at += 1
    return [
        f"{name} {operands}"
        for (_, name, operands), (_, read), known in zip(instructions, effects, before, strict=True)
        if known is not None and "gdesc[" in operands and read & ~known
    ]


def disassemble(cubin: bytes) -> str:
    """The listing of a compiled kernel. RuntimeError where triton has no `nvdisasm`."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def _can_disassemble() -> bool:
    from triton import knobs

    try:
        return bool(knobs.nvidia.nvdisasm.path)
    except RuntimeError as error:
        warnings.warn(
            f"kernels for Hopper are not searched for a known fault of their assembler: {error}", stacklevel=2
        )
        return False


def faulty(compiled: Any) -> bool:
    """Whether a kernel that triton compiled has such descriptors. The answer is kept beside it in triton's cache."""
    from triton.runtime.cache import get_cache_manager

    if "wgmma" not in compiled.asm["ptx"] or not _can_disassemble():
        return False
    cache, name = get_cache_manager(compiled.hash), "cs336_unset_descriptors.txt"
    if (known := cache.get_file(name)) is not None:
        with open(known) as file:
            return bool(file.read())
    found = unset_descriptors(disassemble(compiled.asm["cubin"]))
    cache.put("\n".join(found), name, binary=False)
    return bool(found)
