"""Descriptors that the assembler left unset are found in listings, and kernels that have them are not launched."""

import types

import pytest
from attention_checks import compiler

from cs336_systems.attention import machine_code, tiles

pytest.importorskip("triton")

PRODUCT = (
    "HGMMA.64x32x16.F32.BF16 R88, R28, gdesc[UR16].tnspB, R88"  # of registers and the tile at UR18, UR19
)
BOTH = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4].tnspB, RZ, !UPT"  # of the tiles at UR4, UR5 and UR6, UR7


def listing(*lines):
    """As nvdisasm writes it: addresses before instructions, a semicolon after each, labels at the margin."""
    written = []
    for i, line in enumerate(lines):
        written.append(line if line.startswith(".L") else f"        /*{16 * i:04x}*/   {line} ;")
    return "\n".join([".text.forward_kernel:", *written, ".L_x_9:", "        /*fff0*/   BRA `(.L_x_9);"])


def found(*lines):
    return machine_code.unset_descriptors(listing(*lines))


@pytest.mark.parametrize(
    "lines",
    [
        ("UMOV UR18, 0x1", "UMOV UR19, 0x2", PRODUCT),
        ("ULDC.64 UR18, c[0x0][0x210]", PRODUCT),
        ("UMOV UR4, 0x1", "UMOV UR5, 0x1", "UIMAD.WIDE.U32 UR18, UR4, UR5, URZ", PRODUCT),
        ("EXIT", PRODUCT),  # never reached
        ("@P0 UMOV UR18, 0x1", "UMOV UR19, 0x2", PRODUCT),  # who is predicated is taken to have run
        ("R2UR UR18, R3", "R2UR UR19, R4", "UIADD3 UR18, UP0, UR18, 0x40, URZ", PRODUCT),
        # unset, but nobody's descriptor
        ("UIADD3 UR30, UR31, 0x1, URZ", "ULDC.64 UR18, c[0x0][0x210]", PRODUCT),
        ("MOV R4, UR54", "ULDC.64 UR18, c[0x0][0x210]", PRODUCT),
        # set again
        ("UIADD3 UR18, UR30, 0x1, URZ", "ULDC.64 UR18, c[0x0][0x210]", PRODUCT),
        ("ULDC.64 UR4, c[0x0][0x210]", "ULDC.64 UR6, c[0x0][0x218]", BOTH),
        # the loop is passed only by way of the assignment
        ("ULDC.64 UR18, c[0x0][0x210]", ".L_x_0:", PRODUCT, "@P0 BRA `(.L_x_0)", "EXIT"),
        ("@P0 BRA `(.L_x_1)", "ULDC.64 UR18, c[0x0][0x210]", PRODUCT, ".L_x_1:", "EXIT"),
    ],
)  # fmt: skip
def test_what_is_set_is_not_reported(lines):
    assert found(*lines) == []


@pytest.mark.parametrize(
    "lines",
    [
        (PRODUCT,),
        ("UMOV UR18, 0x1", PRODUCT),
        ("UMOV UR19, 0x1", PRODUCT),
        ("UMOV UR16, 0x1", "UMOV UR17, 0x1", PRODUCT),  # the pair that is not read
        ("UMOV UR19, 0x1", "UIADD3 UR18, UP0, UR18, 0x40, URZ", PRODUCT),  # made from itself
        ("UMOV UR19, 0x1", "UIADD3 UR20, UR21, 0x40, URZ", "UMOV UR18, UR20", PRODUCT),
        ("UIADD3.64 UR18, UR20, UR22, URZ", PRODUCT),
        ("UMOV UR20, 0x1", "UMOV UR22, 0x1", "UMOV UR23, 0x1", "UIADD3.64 UR18, UR20, UR22, URZ", PRODUCT),
        # one way leads past the assignment
        ("@P0 BRA `(.L_x_0)", "ULDC.64 UR18, c[0x0][0x210]", ".L_x_0:", PRODUCT),
        ("BRA.U UP0, `(.L_x_0)", "ULDC.64 UR18, c[0x0][0x210]", ".L_x_0:", PRODUCT),
        ("BRA `(.L_x_0)", "ULDC.64 UR18, c[0x0][0x210]", ".L_x_0:", PRODUCT),
        # the second turn of a loop
        ("ULDC.64 UR18, c[0x0][0x210]", ".L_x_0:", PRODUCT, "UMOV UR18, UR30", "@P0 BRA `(.L_x_0)", "EXIT"),
    ],
)  # fmt: skip
def test_what_is_not_set_on_some_way_is_reported(lines):
    assert found(*lines) == [PRODUCT]


@pytest.mark.parametrize("missing", [4, 5, 6, 7])
def test_both_tiles_of_a_product_are_looked_at(missing):
    lines = [f"UMOV UR{i}, 0x1" for i in range(4, 8) if i != missing]
    assert found(*lines, BOTH) == [BOTH]


def test_an_answer_is_kept_beside_the_kernel(monkeypatch, tmp_path):
    from triton.runtime import cache as of_triton

    asked, kept = [], {}

    class InFiles:
        def get_file(self, name):
            return kept.get(name)

        def put(self, text, name, binary):
            assert not binary
            (tmp_path / name).write_text(text)
            kept[name] = str(tmp_path / name)

    def disassemble(cubin):
        asked.append(cubin)
        return cubin.decode()

    monkeypatch.setattr(of_triton, "get_cache_manager", lambda key: InFiles())
    monkeypatch.setattr(machine_code, "disassemble", disassemble)
    monkeypatch.setattr(machine_code, "_can_disassemble", lambda: True)
    for lines, expected in (([PRODUCT], True), (["ULDC.64 UR18, c[0x0][0x210]", PRODUCT], False)):
        asked.clear(), kept.clear()
        kernel = types.SimpleNamespace(
            asm={"ptx": "wgmma.mma_async", "cubin": listing(*lines).encode()}, hash="a key"
        )
        assert [machine_code.faulty(kernel) for _ in range(3)] == [expected] * 3
        assert len(asked) == 1
        kernel.asm["ptx"] = "mma.sync"
        assert not machine_code.faulty(kernel)


def test_without_the_tool_that_is_said_once(monkeypatch):
    from triton import knobs

    class Missing:
        @property
        def nvdisasm(self):
            raise RuntimeError("Cannot find nvdisasm")

    monkeypatch.setattr(knobs, "nvidia", Missing())
    machine_code._can_disassemble.cache_clear()
    try:
        kernel = types.SimpleNamespace(asm={"ptx": "wgmma"})
        with pytest.warns(UserWarning, match="not searched for a known fault.*Cannot find nvdisasm"):
            assert not machine_code.faulty(kernel)
    finally:
        machine_code._can_disassemble.cache_clear()


# ------------------------------------------------------------------------------------------------ what then
def test_who_is_mistrusted(monkeypatch):
    triton_launch = pytest.importorskip("cs336_systems.attention.triton_launch")
    device = types.SimpleNamespace(type="cuda", index=0)
    faulty, asked = [False], []

    class Kernel:
        def warmup(self, **options):
            asked.append(options)

    monkeypatch.setattr(triton_launch, "faulty", lambda compiled: faulty[0])
    monkeypatch.setattr(triton_launch, "KERNELS", {"forward": Kernel()})
    monkeypatch.setattr(triton_launch, "capability_of", lambda index: capability)

    def mistrusted(column):
        strides = {"q": (1, 1, 64, 1), "k": (1, 1, 64, column), "l": (1, 1, 1)}
        tensors = {
            name: types.SimpleNamespace(device=device, ndim=len(s), stride=s.__getitem__)
            for name, s in strides.items()
        }
        return triton_launch._mistrusted("forward", tensors, {"argument": 1}, tiles.Tiles(64, 64, 4, 3))

    capability = 90
    assert not mistrusted(1) and not mistrusted(0) and mistrusted(2)
    assert asked == [dict(grid=(1,), argument=1, num_warps=4, num_stages=3)] * 2
    faulty[0] = True
    assert mistrusted(1)
    capability = 80
    assert not mistrusted(1) and not mistrusted(2)


def _compile(*args, **options):
    from cs336_systems.attention import aot

    return aot.compile_kernel(*args, **options)


def check_without_wgmma(kernel, head_dim, dtype, **options):
    precision = {"bf16": "half"}.get(dtype, dtype)
    chosen = tiles.tiles_without_wgmma(head_dim, precision)
    compiled = (
        compiler().submit(_compile, kernel, 90, head_dim, dtype, chosen, plain=False, **options).result()
    )
    assert "wgmma" not in compiled.ptx and "mma.sync" in compiled.ptx
    assert compiled.shared_bytes <= tiles.SHARED_MEMORY_KIB[90] * 1024
    assert compiled.spill_bytes <= (2048 if head_dim == 256 and dtype != "bf16" else 256), (
        compiled.spill_bytes
    )


@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_products_without_wgmma(kernel):
    check_without_wgmma(kernel, 20, "bf16", even=False)


@pytest.mark.table
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("head_dim", tiles.HEAD_DIMS)
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_the_table_without_wgmma(kernel, head_dim, dtype):
    check_without_wgmma(kernel, head_dim, dtype)
