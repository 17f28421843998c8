"""What the assembler got wrong is found in listings, descriptors and registers written too early, and kernels that have
it are not launched."""

import hashlib
import types

import pytest
from attention_checks import compiler

from cs336_systems.attention import machine_code
from cs336_systems.attention.triton import tiles

triton = pytest.importorskip("triton")
tl = triton.language

# of registers and the tile at UR18, UR19
PRODUCT = "HGMMA.64x32x16.F32.BF16 R88, R28, gdesc[UR16].tnspB, R88"
BOTH = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4].tnspB, RZ, !UPT"  # of the tiles at UR4, UR5 and UR6, UR7
ADDRESS = "USGXT.U32 UR28, UR12, 0xe"
LOW = "UIADD3 UR18, UP0, UR28, 0x40, URZ"
HIGH = "UIADD3.X UR19, URZ, -0x7fffffe0, URZ, UP0, !UPT"


def listing(*lines):
    """As nvdisasm writes it: addresses before instructions, a semicolon after each, labels at the margin."""
    written = []
    for i, line in enumerate(lines):
        written.append(line if line.startswith(".L") else f"        /*{16 * i:04x}*/   {line} ;")
    return "\n".join([".text.forward_kernel:", *written, ".L_x_9:", "        /*fff0*/   BRA `(.L_x_9) ;"])


def found(*lines):
    return machine_code.wrong_descriptors(listing(*lines))


@pytest.mark.parametrize(
    "lines",
    [
        (ADDRESS, LOW, HIGH),
        ("ULOP3.LUT UR18, UR12, 0x3fff, URZ, 0xc0, !UPT", "UMOV UR19, 0x40000040"),
        ("USGXT.U32 UR28, UR12, 0xf", LOW, HIGH),  # as triton 3.8 has it
        (ADDRESS, "ULOP3.LUT UR18, UR28, 0x1000000, URZ, 0xfc, !UPT", "UMOV UR19, 0x40000040"),
        ("UMOV UR18, 0x100", "UMOV UR19, 0x40000040"),
        (ADDRESS, "UMOV UR29, URZ", "UMOV UR20, 0x40", "UMOV UR21, 0x40000040", "UIADD3.64 UR18, UR28, UR20, URZ"),
        # by way of registers of their own, and of the stack
        (ADDRESS, "MOV R4, UR28.reuse", "R2UR UR18, R4", HIGH),
        (ADDRESS, "IMAD.U32 R4, RZ, RZ, UR28", "STL [R1+0x8], R4", "LDL.LU R7, [R1+0x8]", "R2UR UR18, R7", HIGH),
        (ADDRESS, LOW, "@P0 UMOV UR19, 0x2"),  # what is predicated is taken to have run
        # two registers exchanged without a third
        (
            ADDRESS, "UMOV UR19, UR28", "UMOV UR18, 0x40000040", "ULOP3.LUT UR18, UR18, UR19, URZ, 0x3c, !UPT",
            "ULOP3.LUT UR19, UR19, UR18, URZ, 0x3c, !UPT", "ULOP3.LUT UR18, UR18, UR19, URZ, 0x3c, !UPT",
        ),
        # anything, but nobody's descriptor
        ("UIMAD UR30, UR31, UR32, URZ", "MOV R4, UR54", ADDRESS, LOW, HIGH),
        # the loop is entered only by way of the copy; and turns the tiles round
        (ADDRESS, LOW, HIGH, ".L_x_0:", "UIADD3 UR18, UR18, 0x80, URZ", "USEL UR18, UR18, UR28, UP0"),
        (ADDRESS, "@P0 BRA `(.L_x_0)", LOW, HIGH, "BRA `(.L_x_1)", ".L_x_0:", "UMOV UR19, 0x2", "UMOV UR18, UR28",
         ".L_x_1:"),
        ('BRX R2 -0x190 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)', ".L_x_1:", "EXIT", ".L_x_0:", ADDRESS, LOW, HIGH),
    ],
)  # fmt: skip
def test_descriptors_of_an_address_and_constants_are_right(lines):
    loop = ["@P0 BRA `(.L_x_0)", "EXIT"] if ".L_x_0:" in lines else []
    assert found(*lines, PRODUCT, *loop) == []


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (ADDRESS, LOW),
        (ADDRESS, HIGH),
        (ADDRESS, "UMOV UR16, UR28", "UMOV UR17, 0x1"),  # the pair that is not read
        # the copy is missing: what stands in the registers is another value, or none
        ("UIMAD UR18, UR10, UR18, UR13", ADDRESS, "UIADD3 UR18, UP0, UR18, 0x40, URZ", HIGH),
        (ADDRESS, LOW, "UIADD3.X UR19, UR19, -0x7fffffe0, URZ, UP0, !UPT"),
        (ADDRESS, LOW, HIGH, "ULDC.64 UR18, c[0x0][0x210]"),
        (ADDRESS, LOW, HIGH, "UIMAD.WIDE.U32 UR18, UR4, UR5, URZ"),
        (ADDRESS, "UIADD3 UR18, UR28, UR28, URZ", HIGH),  # two addresses
        (ADDRESS, LOW, "UMOV UR19, UR28"),
        ("USGXT.U32 UR28, UR12, 0x10", LOW, HIGH),  # more bits than an address has
        ("ULOP3.LUT UR18, UR12, 0xffff, URZ, 0xc0, !UPT", HIGH),
        (ADDRESS, LOW, HIGH, "LDL.LU R7, [R1+0x8]", "R2UR UR18, R7"),  # of the stack, where nothing was put
        (ADDRESS, LOW, HIGH, "ULOP3.LUT UP0, UR18, UR30, UR31, URZ, 0xfc, !UPT"),  # a predicate stands first
        # one way leads past the copy
        (ADDRESS, HIGH, "@P0 BRA `(.L_x_0)", LOW, ".L_x_0:"),
        (ADDRESS, HIGH, "BRA.U UP0, `(.L_x_0)", LOW, ".L_x_0:"),
        (ADDRESS, HIGH, "BRA.DIV UR4, `(.L_x_1)", ".L_x_0:", "EXIT", ".L_x_1:"),
        (ADDRESS, HIGH, "BRA `(.L_x_0)", LOW, ".L_x_0:"),
        (ADDRESS, LOW, HIGH, "EXIT"),  # nothing leads there
        # the second turn of a loop
        (ADDRESS, LOW, HIGH, ".L_x_0:", "UMOV UR18, UR30"),
        (ADDRESS, LOW, HIGH, "UIMAD UR30, UR31, UR32, URZ", ".L_x_0:", "UMOV UR18, UR28", "UMOV UR28, UR30"),
    ],
)  # fmt: skip
def test_others_are_wrong(lines):
    loop = ["@P0 BRA `(.L_x_0)", "EXIT"] if ".L_x_0:" in lines else []
    assert found(*lines, PRODUCT, *loop) == [PRODUCT]


@pytest.mark.parametrize("wrong", [4, 5, 6, 7])
def test_both_tiles_of_a_product_are_looked_at(wrong):
    lines = [f"UMOV UR{i}, 0x1" for i in range(4, 8) if i != wrong]
    assert found(*lines, BOTH) == [BOTH]


OF_REGISTERS = f"{PRODUCT}, gsb0"  # R28 to R31; the last of its group
OF_TILES = "HGMMA.64x128x16.F32.BF16 R120, gdesc[UR4], R120, gsb0"
WAIT, ALL_BUT_ONE = (f"WARPGROUP.DEPBAR.LE gsb0, 0x{n}" for n in (0, 1))
WRITE = "MOV R30, R4"


@pytest.mark.parametrize(
    "lines",
    [
        (OF_REGISTERS, WAIT, WRITE),
        (WRITE, PRODUCT, OF_REGISTERS, WAIT, WRITE),
        (OF_REGISTERS, OF_TILES, ALL_BUT_ONE, WRITE, WAIT),  # the other group may be at work
        (OF_REGISTERS, "LDS.128 R24, [R4]", "LDS.64 R32, [R4]", "UMOV UR28, UR4", OF_REGISTERS, WAIT, WRITE),
        # what only reads
        (OF_REGISTERS, "STS [R28], R29", "ISETP.GE.AND P0, PT, R28, R4, PT", "BAR.SYNC.DEFER_BLOCKING R28, 0x80"),
        (".L_x_0:", WRITE, OF_REGISTERS, WAIT, "@P0 BRA `(.L_x_0)", "EXIT"),
        (".L_x_0:", WRITE, OF_REGISTERS, OF_TILES, ALL_BUT_ONE, "@P0 BRA `(.L_x_0)", "EXIT"),
        ("@P0 BRA `(.L_x_0)", OF_REGISTERS, WAIT, ".L_x_0:", WRITE),
    ],
)  # fmt: skip
def test_registers_may_be_written_after_a_wait(lines):
    assert machine_code.overwritten_operands(listing(*lines)) == (" ".join(lines).count(", R28, gdesc"), [])


@pytest.mark.parametrize(
    "write",
    [
        WRITE, "@P0 MOV R30, R4", "MOV R28, R28.reuse", "LDS.128 R25, [R4]", "LDSM.16.M88.4 R31, [R4]",
        "LDG.E.64 R27, desc[UR8][R4.64]", "IMAD.WIDE.U32 R27, R4, R5, R6", "CS2R R30, SRZ", "LDL.LU R28, [R1+0x8]",
        "SHFL.IDX PT, R30, R4, R5, 0x1f", "HMMA.16816.F32.BF16 R26, R4, R8, R26",
        "HGMMA.64x64x16.F32.BF16 R0, gdesc[UR4], RZ, !UPT",
    ],
)  # fmt: skip
def test_whatever_writes_them_before_is_found(write):
    _, wrong = machine_code.overwritten_operands(listing(OF_REGISTERS, write, WAIT))
    assert wrong == [write.removeprefix("@P0 ").replace(".reuse", "")]


@pytest.mark.parametrize(
    "lines",
    [
        (OF_REGISTERS, ALL_BUT_ONE, WRITE),
        (OF_REGISTERS, "@P0 " + WAIT, WRITE),
        (OF_REGISTERS, "DEPBAR.LE SB0, 0x0", WRITE),  # waits for something else
        (PRODUCT, WAIT, WRITE),  # its group has not ended
        (OF_REGISTERS, OF_TILES, PRODUCT, ALL_BUT_ONE, WRITE),  # read twice, and once waited for
        (OF_REGISTERS, "@P0 BRA `(.L_x_0)", WAIT, ".L_x_0:", WRITE),  # one way leads past the wait
        (".L_x_0:", WRITE, OF_REGISTERS, ALL_BUT_ONE, "@P0 BRA `(.L_x_0)", "EXIT"),  # in the second turn
        (OF_REGISTERS, "BRA `(.L_x_1)", ".L_x_0:", WRITE, "EXIT", ".L_x_1:", "BRA `(.L_x_0)"),
    ],
)
def test_so_is_what_no_wait_precedes_on_some_path(lines):
    assert machine_code.overwritten_operands(listing(*lines))[1] == [WRITE]


def test_a_product_to_which_no_path_leads_is_not_vouched_for():
    assert machine_code.overwritten_operands(listing("EXIT", OF_REGISTERS)) == (1, [OF_REGISTERS])


def _compile_with_a_barrier(used):
    """A kernel that draws a number, which triton passes from thread to thread in shared memory."""
    import torch
    from barrier_kernel import draw

    from cs336_systems.attention.checks import aot

    counter, out = torch.zeros(1).int(), torch.zeros(1).int()
    return aot.compiled("draw", lambda: draw[(1,)](counter, out, USED=used, num_warps=4))


@pytest.mark.versions
def test_memory_of_a_barrier_that_nothing_waits_for_is_not_for_others():
    dead, used = (compiler().submit(_compile_with_a_barrier, used).result() for used in (False, True))
    assert "memory of an mbarrier holds other data" in " ".join(dead.faults) and not used.faults


def test_an_invalidated_barrier_leaves_its_memory():
    made = "mov.b32 %r1, global_smem; add.s32 %r2, %r1, 64; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; "
    stored = "st.shared.v2.b32 [%r1 + 60], {%r3, %r4};"
    assert machine_code.reused_barriers(made + stored) == ["offset 64"]
    assert machine_code.reused_barriers(made + "mbarrier.inval.shared::cta.b64 [%r2]; " + stored) == []
    assert machine_code.reused_barriers(made + stored.replace("60", "72")) == []


class Asm(dict):
    """As triton's: what it does not have it would make, and may not be able to."""

    def __missing__(self, key):
        raise KeyError(f"Unknown key: {key!r}")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Triton's cache in an empty folder, and listings in place of kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code, "_known", {})
    monkeypatch.setattr(machine_code, "disassemble", lambda cubin: cubin.decode())
    return tmp_path


def kernel(*lines, **others):
    cubin = listing(*lines).encode()
    asm = Asm({"ptx": "wgmma.mma_async", "cubin": cubin} | others)
    return types.SimpleNamespace(asm=asm, hash=hashlib.sha256(cubin).hexdigest())


GOOD, BAD = (ADDRESS, LOW, HIGH, PRODUCT), (PRODUCT,)
EARLY = (ADDRESS, LOW, HIGH, OF_REGISTERS, WRITE)


@pytest.mark.versions
@pytest.mark.parametrize(("lines", "expected"), [(GOOD, False), (BAD, True), (EARLY, True)], ids=str)
def test_an_answer_is_kept_beside_the_kernel(lines, expected, cache, monkeypatch):
    assert machine_code.faulty(kernel(*lines)) is expected
    (kept,) = cache.rglob("cs336_*")
    monkeypatch.setattr(machine_code, "disassemble", None)
    assert machine_code.faulty(kernel(*lines)) is expected  # from memory
    machine_code._known.clear()
    assert machine_code.faulty(kernel(*lines)) is expected  # from the file
    # an empty file says nothing
    machine_code._known.clear()
    kept.write_text("")
    monkeypatch.setattr(machine_code, "disassemble", lambda cubin: cubin.decode())
    assert machine_code.faulty(kernel(*lines)) is expected


@pytest.mark.versions
def test_a_cache_that_is_only_read(cache, monkeypatch):
    from triton.runtime.cache import FileCacheManager

    def put(*arguments, **options):
        raise PermissionError("read-only")

    monkeypatch.setattr(FileCacheManager, "put", put)
    assert machine_code.faulty(kernel(*BAD)) and not machine_code.faulty(kernel(*GOOD))


def test_which_kernels_are_read(cache, monkeypatch):
    bad = kernel(*BAD)
    del bad.asm["ptx"]
    assert machine_code.faulty(bad)  # whatever it is
    monkeypatch.setattr(machine_code, "disassemble", None)
    assert not machine_code.faulty(kernel(*BAD, *BAD, ptx="mma.sync"))  # without wgmma

    def disassemble(cubin):
        raise RuntimeError("Cannot find nvdisasm")

    monkeypatch.setattr(machine_code, "disassemble", disassemble)
    with pytest.warns(UserWarning, match="not searched for known faults.*Cannot find nvdisasm"):
        assert not machine_code.faulty(kernel(*BAD, *BAD))


# ------------------------------------------------------------------------------------------------ what then
def test_who_is_mistrusted(monkeypatch):
    launch = pytest.importorskip("cs336_systems.attention.triton.launch")
    device = types.SimpleNamespace(type="cuda", index=0)
    faulty, asked = [False], []

    class Kernel:
        def warmup(self, **options):
            asked.append(options)

    monkeypatch.setattr(launch, "faulty", lambda compiled: faulty[0])
    monkeypatch.setattr(launch, "capability_of", lambda index: capability)
    monkeypatch.setattr(launch, "INTERPRETED", False)

    def mistrusted(column):
        arguments = {"stride_q_row": 64, "stride_q_col": 1, "stride_k_col": column}
        return launch._mistrusted(Kernel(), arguments, tiles.Tiles(64, 64, 4, 3), device)

    capability = 90
    assert not mistrusted(1) and not mistrusted(0) and mistrusted(2)
    options = dict(num_warps=4, num_stages=3, enable_fp_fusion=True)
    assert [x.pop("stride_k_col") for x in asked] == [1, 0]
    assert asked == [dict(grid=(1,), stride_q_row=64, stride_q_col=1) | options] * 2
    faulty[0] = True
    assert mistrusted(1)
    with monkeypatch.context() as interpreted:
        interpreted.setattr(launch, "INTERPRETED", True)
        assert not mistrusted(1) and not mistrusted(2)
    capability = 80
    assert not mistrusted(1) and not mistrusted(2)


class _NamesItsTarget:
    """What triton asks of a driver to compile and not to launch."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def _searched():
    """Hopper's ptxas, and of both layouts of the keys (columns together, and apart) whether the kernel of a forward
    pass for Hopper is faulty: bf16, d = 20, 13 queries, 9 keys."""
    import torch
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.runtime import driver

    from cs336_systems.attention.triton import launch

    driver.set_active(_NamesItsTarget())
    chosen = tiles.tiles("forward", 90, 20, "half")
    q = torch.empty(4, 13, 2, 20, dtype=torch.bfloat16).permute(2, 0, 1, 3)
    v = torch.empty(4, 9, 2, 20, dtype=torch.bfloat16).permute(2, 0, 1, 3)
    apart = torch.empty(2, 4, 20, 9, dtype=torch.bfloat16).transpose(2, 3)
    faulty = []
    for k in (apart.contiguous(), apart):
        first = launch.First(q, k, v, torch.empty_like(q), torch.empty(2, 4, 13), True)
        kernel = launch.KERNELS["forward"]
        arguments, _ = first.arguments(kernel, **launch.values_of(first, "forward", chosen))
        compiled = kernel.warmup(grid=(1,), **arguments, **launch.options_of(chosen))
        assert "wgmma" in compiled.asm["ptx"]
        faulty.append(machine_code.faulty(compiled))
    return get_ptxas(90).version, faulty


@pytest.mark.versions
def test_what_a_launch_would_compile_is_searched():
    """The way of `_mistrusted` through triton's warmup, and a kernel known to be wrong from one release of ptxas."""
    version, faulty = compiler().submit(_searched).result()
    assert faulty == [False, version.startswith("12.8")], version


@triton.jit
def _converting_kernel(a_ptr, b_ptr, c_ptr, stride, length):
    """c = a b of one tile in bf16, from a in int8: conversion leaves A in registers, and the loop is pipelined."""
    i, k = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    total = tl.zeros((64, 64), tl.float32)
    for start in range(0, length, 64):
        a = tl.load(a_ptr + i * stride + start + k).to(tl.bfloat16)
        total = tl.dot(a, tl.load(b_ptr + (start + i) * stride + k), total)
    tl.store(c_ptr + i * stride + k, total)


def _converting():
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    types = ("*i8", "*bf16", "*fp32", "i32", "i32")
    signature = dict(zip(_converting_kernel.arg_names, types, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(5)}
    source = ASTSource(_converting_kernel, signature, {}, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=3)
    )
    return get_ptxas(90).version, machine_code.overwritten_operands(
        machine_code.disassemble(compiled.asm["cubin"])
    )


@pytest.mark.versions
def test_a_kernel_known_to_be_wrong_from_two_releases_of_ptxas():
    version, (count, wrong) = compiler().submit(_converting).result()
    assert count == 4 and bool(wrong) == (float(version) < 13.3), version


def _compile(*args, **options):
    from cs336_systems.attention.checks import aot

    return aot.compile_kernel(*args, **options)


def check_without_wgmma(kernel, head_dim, dtype, **options):
    chosen = tiles.tiles_without_wgmma(head_dim, {"bf16": "half"}.get(dtype, dtype))
    given = (kernel, 90, head_dim, dtype, chosen)
    compiled = compiler().submit(_compile, *given, plain=False, **options).result()
    assert "wgmma" not in compiled.ptx and "mma.sync" in compiled.ptx
    assert compiled.shared_bytes <= tiles.SHARED_MEMORY_KIB[90] * 1024
    assert compiled.spill_bytes <= (2048 if head_dim == 256 and dtype != "bf16" else 256)


@pytest.mark.versions
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_products_without_wgmma(kernel):
    check_without_wgmma(kernel, 20, "bf16", even=False)


@pytest.mark.table
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("head_dim", tiles.HEAD_DIMS)
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_the_table_without_wgmma(kernel, head_dim, dtype):
    check_without_wgmma(kernel, head_dim, dtype)
