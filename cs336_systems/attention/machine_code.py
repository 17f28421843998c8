"""Reads the machine code of Triton's kernels for Hopper, to refuse what the assembler got wrong.

A wgmma instruction finds its tiles by descriptors: 14 bits of a tile's address in shared memory in the low word, and
constants beside them and in the high word. ptxas 12.8, which comes with triton 3.6 and 3.7, now and then forgets to
copy that address to the registers that it computes a descriptor in, and computes it from what stands there. The wgmma
then reads other rows, or unmapped memory. Known cases are kernels under register pressure, on tensors whose columns are
not contiguous; whether it happens depends on every stride, so no test can cover all of them. What later releases of
ptxas make (12.9 with triton 3.8, 13.4 with 3.9) is searched in the same way.

`wrong_descriptors` follows where descriptors come from, along every path through a kernel. That finds registers without
the copy, whatever stands in them; it does not vouch for the rest of the code. Portable kernels are searched before they
first run; those for Hopper, which are few, in the tests that compile them.

Sources: the listing of `nvdisasm` (CUDA Binary Utilities, instruction set of Hopper); PTX ISA 8.7, descriptors of
wgmma; faults of this family in triton's issues 10486 and 11366.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import subprocess
import sys
import tempfile
import warnings
from typing import Any

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
_NUMBER = re.compile(r"-?0x[0-9a-f]+$")
_REGISTER = re.compile(r"(U?R)(\d+)$")
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]$")
_DESCRIPTORS = re.compile(r"gdesc\[UR(\d+)\]")
_ADDRESS_BITS = 15  # of a multiple of 16 in at most 256 KiB it takes 14; triton 3.8 and later mask one more

# What a register holds: a known number (int), some constant, an address of such bits plus constants, or anything else.
# ("xor", a, b): one step of exchanging two registers without a third.
CONSTANT, ADDRESS, OTHER = "constant", "address", "other"
Value = int | str | tuple
State = dict[str, Value]


def _constant(value: Value) -> bool:
    return isinstance(value, int) or value == CONSTANT


def _either(a: Value, b: Value) -> Value:
    """What is known where two paths join."""
    if a == b:
        return a
    if _constant(a) and _constant(b):
        return CONSTANT
    return ADDRESS if all(_constant(x) or x == ADDRESS for x in (a, b)) else OTHER


def _sum(values: list[Value]) -> Value:
    if all(isinstance(x, int) for x in values):
        return sum(values) & 0xFFFFFFFF
    if all(map(_constant, values)):
        return CONSTANT
    others = [x for x in values if not _constant(x)]
    return ADDRESS if others == [ADDRESS] else OTHER


def _number(operand: str) -> int | None:
    return int(operand, 16) & 0xFFFFFFFF if _NUMBER.match(operand) else None


def _value(state: State, operand: str) -> Value:
    if operand in ("RZ", "URZ", "SRZ"):
        return 0
    if (number := _number(operand)) is not None:
        return number
    negative, name = operand.startswith("-"), operand.lstrip("-")
    value = state.get(name, OTHER)
    if negative:
        return -value & 0xFFFFFFFF if isinstance(value, int) else value if value == CONSTANT else OTHER
    return value


def _high(operand: str) -> str:
    """The second register of a pair; of a number its sign."""
    if found := _REGISTER.match(operand.lstrip("-")):
        return f"{'-' * operand.startswith('-')}{found[1]}{int(found[2]) + 1}"
    return "-0x1" if operand.startswith("-0x") else "URZ"


def _logic(state: State, sources: list[str]) -> Value:
    """A bitwise operation of three operands by its truth table."""
    a, b, table = _value(state, sources[0]), _value(state, sources[1]), sources[3]
    if table == "0xc0" and isinstance(b, int) and b < 1 << _ADDRESS_BITS:  # a & b
        return ADDRESS
    if table == "0xfc" and a == ADDRESS and _constant(b):  # a | b
        return ADDRESS
    if table == "0x3c" and sources[2] in ("RZ", "URZ"):  # a ^ b
        for both, one in ((a, b), (b, a)):
            if isinstance(both, tuple) and one in both[1:]:
                return both[2] if both[1] == one else both[1]
        return ("xor", a, b)
    return OTHER


def _written(state: State, name: str, operands: list[str]) -> State:
    """The registers that an instruction writes (and places of the stack, by their offset), with what they then hold."""
    kind, *more = name.split(".")
    count = 4 if "128" in more or kind == "LDSM" else 2 if "64" in more or "WIDE" in more else 1
    if kind in ("STL", "LDL"):
        place, register = operands if kind == "STL" else operands[::-1]
        found, first = _STACK.match(place), _REGISTER.match(register)
        if kind == "STL" and found:
            start, number = int(found[1] or "0", 16), int(first[2]) if first else 0
            held = [state.get(f"R{number + i}", OTHER) if first else 0 for i in range(count)]
            return {f"stack {start + 4 * i}": held[i] for i in range(count)}
        if kind == "LDL" and first:
            start, number = int(found[1] or "0", 16) if found else -1024, int(first[2])
            return {f"R{number + i}": state.get(f"stack {start + 4 * i}", OTHER) for i in range(count)}
        return {}
    while operands and _PREDICATE.match(operands[0]):
        operands = operands[1:]
    if not operands or not (target := _REGISTER.match(operands[0])):
        return {}
    into, sources = operands[0], [x for x in operands[1:] if not _PREDICATE.match(x)]
    if kind == "HGMMA":
        return {f"R{int(target[2]) + i}": OTHER for i in range(int(re.search(r"x(\d+)x", name)[1]) // 2)}
    if kind == "CS2R" and sources == ["SRZ"]:
        return {into: 0} | ({} if "32" in more else {_high(into): 0})
    if kind == "UIADD3" and "64" in more:
        return {
            into: _sum([_value(state, x) for x in sources]),
            _high(into): _sum([_value(state, _high(x)) for x in sources]),
        }
    if count == 1:
        if kind in ("UIADD3", "IADD3", "VIADD"):
            return {into: _sum([_value(state, x) for x in sources[:3]])}
        if kind in ("MOV", "UMOV", "R2UR"):
            return {into: _value(state, sources[0])}
        if kind == "IMAD" and sources[:2] == ["RZ", "RZ"]:
            return {into: _value(state, sources[2])}
        if name == "IMAD.IADD" and sources[1] == "0x1":
            return {into: _sum([_value(state, sources[0]), _value(state, sources[2])])}
        if kind in ("SGXT", "USGXT") and "U32" in more and (_number(sources[1]) or 32) <= _ADDRESS_BITS:
            return {into: ADDRESS}
        if kind in ("LOP3", "ULOP3"):
            return {into: _logic(state, sources)}
        if kind in ("SEL", "USEL"):
            return {into: _either(_value(state, sources[0]), _value(state, sources[1]))}
    return {f"{target[1]}{int(target[2]) + i}": OTHER for i in range(count)}


def _sound(state: State, operands: list[str]) -> bool:
    """Whether the descriptors of a wgmma instruction are what they have to be."""
    for i, operand in enumerate(operands):
        if found := _DESCRIPTORS.match(operand):
            first = int(found[1])
            # the first pair is A's descriptor, unused where A is in registers
            for low in (first, first + 2) if i == 1 else (first + 2,):
                words = [state.get(f"UR{low + j}", OTHER) for j in (0, 1)]
                if not (words[0] == ADDRESS or _constant(words[0])) or not _constant(words[1]):
                    return False
    return True


def wrong_descriptors(listing: str) -> list[str]:
    """The wgmma instructions of a kernel, as `nvdisasm -c` lists it, whose descriptors on some path there do not come
    from an address and constants, or to which no path was found."""
    instructions: list[tuple[str | None, str, list[str]]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            operands = [x.strip().removesuffix(".reuse") for x in found[3].split(",")]
            instructions.append((found[1], found[2], operands))
    starts = set(labels.values())
    before: dict[int, State] = {0: {}}
    sound: dict[int, bool] = {}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        state = dict(before[at])
        while at < len(instructions):
            predicate, name, operands = instructions[at]
            if "gdesc[" in " ".join(operands):
                sound[at] = _sound(state, operands)
            kind, always = name.split(".")[0], predicate is None and not _PREDICATE.match(operands[0])
            state |= _written(state, name, operands)
            targets = []
            if kind in ("BRA", "BRX", "BRXU", "CALL"):
                targets = [labels[x] for x in re.findall(r"\.L_x_\d+", ",".join(operands)) if x in labels]
            ends = kind in ("BRX", "BRXU") or (
                kind in ("BRA", "EXIT", "RET") and always and ".DIV" not in name
            )
            at += 1
            if not ends and at in starts:
                targets.append(at)
            for target in targets:
                known = before.get(target)
                # what only one of two paths has set is anything on the other
                new = (
                    state
                    if known is None
                    else {r: _either(known[r], state[r]) for r in known.keys() & state.keys()}
                )
                if known is None or new != known:
                    before[target] = dict(new)
                    waiting.append(target)
            if ends or at in starts:
                break
    return [
        f"{name} {', '.join(operands)}"
        for i, (_, name, operands) in enumerate(instructions)
        if "gdesc[" in " ".join(operands) and not sound.get(i, False)
    ]


def disassemble(cubin: bytes) -> str:
    """The listing of a compiled kernel. RuntimeError where triton has no `nvdisasm`, CalledProcessError where that
    cannot read the kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def _file_name() -> str:
    """Of an answer in triton's cache; another for other code than this."""
    code = inspect.getsource(sys.modules[__name__])
    return f"cs336_wrong_descriptors_{hashlib.sha256(code.encode()).hexdigest()[:12]}.txt"


_known: dict[str, bool] = {}  # by the kernel's hash
GOOD = "none"


def faulty(compiled: Any) -> bool:
    """Whether a kernel that triton compiled has such descriptors. The answer is kept beside it in triton's cache. Where
    the code cannot be read, a warning says so, and the answer is no."""
    from triton.runtime.cache import get_cache_manager

    key = compiled.hash
    if "wgmma" not in compiled.asm.get("ptx", "wgmma"):
        return False
    if key in _known:
        return _known[key]
    cache = get_cache_manager(key)
    if (path := cache.get_file(_file_name())) is not None:
        with open(path) as file:
            if text := file.read():  # an empty file is what a full disk leaves
                return _known.setdefault(key, text != GOOD)
    try:
        listing = disassemble(compiled.asm["cubin"])
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        warnings.warn(
            f"a kernel for Hopper is not searched for a known fault of its assembler: {error}", stacklevel=2
        )
        return _known.setdefault(key, False)
    found = wrong_descriptors(listing)
    with contextlib.suppress(OSError):  # a read-only cache: the next process looks again
        cache.put("\n".join(found) or GOOD, _file_name(), binary=False)
    return _known.setdefault(key, bool(found))
