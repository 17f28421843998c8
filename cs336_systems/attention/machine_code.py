"""Reads the machine code of Triton's kernels for Hopper, to refuse what the assembler got wrong.

A wgmma instruction finds its tiles by descriptors: 14 bits of a tile's address in shared memory in the low word, and
constants beside them and in the high word. ptxas 12.8, which comes with triton 3.6 and 3.7, now and then forgets to
copy that address to the registers that it computes a descriptor in, and computes it from what stands there. The wgmma
then reads other rows, or unmapped memory. Known cases are kernels under register pressure, on tensors whose columns are
not contiguous; whether it happens depends on every stride, so no test can cover all of them. What later releases of
ptxas make (12.9 with triton 3.8, 13.4 with 3.9) is searched in the same way.

A wgmma instruction may take its left operand, A, from four registers of each thread, as attention's later products
take P and dS. It reads them after it was issued, so they must not be written before a wait: `HGMMA ..., gsb0` ends a
group of products, `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n groups are left, nothing else waits for them.
ptxas 12.8 and 12.9 (triton 3.6 to 3.8) reuse such registers too early in pipelined loops that convert A; 13.3 and 13.4
do not. Kernels for Hopper were searched with triton 3.6 to 3.9 (bf16, causal), portable ones with 3.7 and 3.8: none has
that fault.

An mbarrier is memory that must be invalidated before it holds anything else (PTX ISA, mbarrier). Triton gives the
memory of one that nothing waits for to other data, and does not invalidate it. When the driver then takes the GPU from
a program, for another process, and gives it back, the mbarrier stands there as it was initialized, and the data are
lost. So the backward pass for Hopper lost tiles of keys whose drawn numbers lay there: a kernel must not make barriers
that it does not use, and `reused_barriers` finds them.

`wrong_descriptors` and `overwritten_operands` follow every path through a kernel. The first finds registers without the
copy, whatever stands in them; neither vouches for the rest of the code. Portable kernels are searched before they first
run; those for Hopper, which are few, in the tests that compile them.

Sources: the listing of `nvdisasm` (CUDA Binary Utilities, instruction set of Hopper); PTX ISA 8.7, descriptors of
wgmma and wgmma.wait_group; faults of these families in triton's issues 10486 and 11366 and pull request 11781.
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
from collections.abc import Callable
from typing import Any

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
_NUMBER = re.compile(r"-?0x[0-9a-f]+$")
_REGISTER = re.compile(r"(U?R)(\d+)$")
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]$")
_DESCRIPTORS = re.compile(r"gdesc\[UR(\d+)\]")
_READ_ONLY = re.compile(r"BAR|BRX|CALL|FCHK|NANOSLEEP|R2P|RET|WARPSYNC|\w*SETP2?$")  # these write no register
_REGISTERS_OF_A = 4  # 64 rows of 32 bytes among 128 threads
# in PTX: registers with the start of shared memory, or a constant behind; what is done with mbarriers and data
_START = re.compile(r"mov\.\w+\s+(%r\d+), global_smem;")
_OFFSET = re.compile(r"add\.s32\s+(%r\d+), %r\d+, (\d+);")
_SHARED = re.compile(
    r"\b(?:mbarrier\.(init|inval)|ld|st)\.shared(?:::cta)?([.\w]*)\s[^\[;]*\[\s*(%r\d+|global_smem)(?:\s*\+\s*(\d+))?"
)
_ADDRESS_BITS = 15  # of a multiple of 16 in at most 256 KiB it takes 14; triton 3.8 and later mask one more

# What a register holds: a known number (int), some constant, an address of such bits plus constants, or anything else.
# ("xor", a, b): one step of exchanging two registers without a third.
CONSTANT, ADDRESS, OTHER = "constant", "address", "other"
Value = int | str | tuple
State = dict[str, Value]
Instruction = tuple[str | None, str, list[str]]  # its predicate, its name, its operands


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


def _parsed(listing: str) -> tuple[list[Instruction], list[list[int]]]:
    """A kernel's instructions, and which ones may follow each."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            code.append((found[1], found[2], [x.strip().removesuffix(".reuse") for x in found[3].split(",")]))
    following = []
    for at, (predicate, name, operands) in enumerate(code):
        kind, always = name.split(".")[0], predicate is None and not _PREDICATE.match(operands[0])
        targets = []
        if kind in ("BRA", "BRX", "BRXU", "CALL"):
            targets = [labels[x] for x in re.findall(r"\.L_x_\d+", ",".join(operands)) if x in labels]
        ends = kind in ("BRA", "EXIT", "RET") and always and ".DIV" not in name
        if not ends and kind not in ("BRX", "BRXU"):
            targets.append(at + 1)
        following.append([x for x in targets if x < len(code)])
    return code, following


def _follow(
    following: list[list[int]], step: Callable[[int, dict], None], join: Callable[[dict, dict], dict]
) -> None:
    """Takes every path through a kernel, with what is known on the way: nothing at first. `step` is called for each
    instruction, again where more paths lead to it than before, and changes what is known; `join` makes one of two."""
    starts = {x for at, targets in enumerate(following) for x in targets if x != at + 1}
    before: dict[int, dict] = {0: {}}
    waiting = [0] if following else []
    while waiting:
        at = waiting.pop()
        state, goes_on = dict(before[at]), True
        while goes_on:
            step(at, state)
            goes_on = at + 1 in following[at] and at + 1 not in starts
            for target in [] if goes_on and len(following[at]) == 1 else following[at]:
                if target in starts:
                    known = before.get(target)
                    new = dict(state) if known is None else join(known, state)
                    if new != known:
                        before[target] = new
                        waiting.append(target)
            at += 1


def _shown(code: list[Instruction], places: set[int]) -> list[str]:
    return [f"{name} {', '.join(operands)}" for _, name, operands in (code[at] for at in sorted(places))]


def wrong_descriptors(listing: str) -> list[str]:
    """The wgmma instructions of a kernel, as `nvdisasm -c` lists it, whose descriptors on some path there do not come
    from an address and constants, or to which no path was found."""
    code, following = _parsed(listing)
    sound = {at: False for at, (_, _, operands) in enumerate(code) if "gdesc[" in " ".join(operands)}

    def step(at: int, state: State) -> None:
        _, name, operands = code[at]
        if at in sound:
            sound[at] = _sound(state, operands)
        state |= _written(state, name, operands)

    def join(a: State, b: State) -> State:
        # what only one of two paths has set is anything on the other
        return {r: _either(a[r], b[r]) for r in a.keys() & b.keys()}

    _follow(following, step, join)
    return _shown(code, {at for at in sound if not sound[at]})


def _registers(operand: str, count: int) -> range:
    found = _REGISTER.match(operand)
    return range(int(found[2]), int(found[2]) + count) if found and found[1] == "R" else range(0)


def _of_a(name: str, operands: list[str]) -> range:
    """The registers from which a wgmma instruction reads A; none of another instruction, or of A in shared memory."""
    return _registers(operands[1], _REGISTERS_OF_A) if "GMMA." in name else range(0)


def _targets(name: str, operands: list[str]) -> range:
    """The registers that an instruction writes, uniform ones aside."""
    kind, *more = name.split(".")
    while operands and _PREDICATE.match(operands[0]):
        operands = operands[1:]
    if not operands or _READ_ONLY.match(kind):
        return range(0)
    count = 1
    if "GMMA." in name:
        count = int(name.split("x")[1]) // (4 if more[1] == "F16" else 2)
    elif "128" in more or kind.endswith("MMA") or more[-1:] == ["4"]:
        count = 4
    elif {"64", "WIDE", "F64"} & {*more} or more[-1:] == ["2"] or name == "CS2R" or kind[0] == "D":
        count = 2
    return _registers(operands[0], count)


def overwritten_operands(listing: str) -> tuple[int, list[str]]:
    """How many wgmma instructions of a kernel, as `nvdisasm -c` lists it, read A from registers; and the instructions
    that on some path write such a register before a wait, or products to which no path was found."""
    code, following = _parsed(listing)
    products = {at for at, (_, name, operands) in enumerate(code) if _of_a(name, operands)}
    reached, wrong = set(), set()

    def step(at: int, pending: dict[int, int]) -> None:
        """pending: of registers that may still be read, how many groups have ended since, their own among them."""
        predicate, name, operands = code[at]
        reached.add(at)
        if pending and not pending.keys().isdisjoint(_targets(name, operands)):
            wrong.add(at)
        pending |= dict.fromkeys(_of_a(name, operands), 0)
        if operands[-1] == "gsb0":
            pending |= {register: ended + 1 for register, ended in pending.items()}
        elif name == "WARPGROUP.DEPBAR.LE" and operands[0] == "gsb0" and predicate is None:
            for register in [r for r, ended in pending.items() if ended > int(operands[1], 16)]:
                del pending[register]

    def join(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
        return a | {register: min(ended, a.get(register, ended)) for register, ended in b.items()}

    _follow(following, step, join)
    return len(products), _shown(code, wrong | (products - reached))


def reused_barriers(ptx: str) -> list[str]:
    """Where a kernel keeps other data in the memory of an mbarrier that it did not invalidate, by offsets in shared
    memory that the code names as constants (see the module's text)."""
    offsets = dict.fromkeys(["global_smem", *_START.findall(ptx)], "0") | dict(_OFFSET.findall(ptx))
    by_use: dict[str, set[int]] = {"init": set(), "inval": set(), "data": set()}
    for barrier, kind, base, more in _SHARED.findall(ptx):
        if base not in offsets:  # it differs between threads
            continue
        at = int(offsets[base]) + int(more or "0")
        words = int(kind[2]) if kind.startswith(".v") else 1
        by_use[barrier or "data"] |= {at + 4 * i for i in range(1 if barrier else words)}
    kept = by_use["init"] - by_use["inval"]
    return [f"offset {at}" for at in sorted(kept) if {at, at + 4} & by_use["data"]]


def faults(listing: str, ptx: str = "") -> list[str]:
    """What the compiler got wrong in a kernel, as `nvdisasm -c` lists it, and in its PTX, as far as is looked for."""
    return [
        *(f"wrong descriptors: {x}" for x in wrong_descriptors(listing)),
        *(f"an operand of wgmma is overwritten: {x}" for x in overwritten_operands(listing)[1]),
        *(f"memory of an mbarrier holds other data: {x}" for x in reused_barriers(ptx)),
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
    return f"cs336_faults_{hashlib.sha256(code.encode()).hexdigest()[:12]}.txt"


_known: dict[str, bool] = {}  # by the kernel's hash
GOOD = "none"


def faulty(compiled: Any) -> bool:
    """Whether a kernel that triton compiled has `faults`. The answer is kept beside it in triton's cache. Where the
    code cannot be read, a warning says so, and the answer is no."""
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
            f"a kernel for Hopper is not searched for known faults of its assembler: {error}", stacklevel=2
        )
        return _known.setdefault(key, False)
    found = faults(listing, compiled.asm.get("ptx", ""))
    with contextlib.suppress(OSError):  # a read-only cache: the next process looks again
        cache.put("\n".join(found) or GOOD, _file_name(), binary=False)
    return _known.setdefault(key, bool(found))
