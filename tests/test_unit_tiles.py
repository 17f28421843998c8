"""Every frozen tile configuration compiles for its target without a GPU, without spilling, within its shared memory."""

import functools
import math
import types

import pytest
from attention_checks import compiler

from cs336_systems.attention.triton import tiles

pytest.importorskip("triton")
PRECISIONS = {"bf16": "half", "fp16": "half", "fp32": "fp32", "tf32": "tf32"}

MAX_REGISTERS = 255  # a thread's
# of all threads' stores and loads together: some registers, once, outside of the inner loop
SPILL_BYTES = 320
SPILL_BYTES_D256 = (
    2048  # fp32 with d = 256 (and d = 256 on Turing): the smallest tiles there are spill this much
)


def _compile(kernel, capability, head_dim, dtype, chosen, variant):
    from cs336_systems.attention.checks import aot

    return aot.compile_kernel(kernel, capability, head_dim, dtype, chosen, **variant)


def check(kernel, capability, head_dim, dtype, programs=math.inf, **variant):
    """Compiles the table's configuration in a process of its own kind: here the kernels may be the interpreter's."""
    chosen = tiles.tiles(kernel, capability, head_dim, PRECISIONS[dtype], programs)
    compiled = compiler().submit(_compile, kernel, capability, head_dim, dtype, chosen, variant).result()
    where = f"{kernel} sm_{capability} d={head_dim} {dtype} {chosen} {variant}"
    limit = tiles.SHARED_MEMORY_KIB[capability] * 1024
    allowed = SPILL_BYTES_D256 if head_dim == 256 and (dtype == "fp32" or capability == 75) else SPILL_BYTES
    assert compiled.spill_bytes <= allowed, where
    assert compiled.shared_bytes <= limit, where
    assert not compiled.faults, where
    # a block fits a multiprocessor's registers
    assert compiled.registers <= MAX_REGISTERS and compiled.registers * compiled.num_threads <= 65536, where
    return compiled


@pytest.mark.versions
@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "even"),
    [
        (80, 128, "bf16", True),
        (90, 80, "bf16", False),
        (90, 64, "fp32", True),
        pytest.param(100, 128, "bf16", True, marks=pytest.mark.table),  # the tiles of 80
    ],
)
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_kernels_compile_for_their_targets(kernel, capability, head_dim, dtype, even):
    compiled = check(kernel, capability, head_dim, dtype, even=even)
    if (capability, dtype) == (90, "bf16"):
        assert "wgmma.mma_async" in compiled.ptx, "on Hopper the products should be warp-group instructions"


WINDOW, PACKED = {"window": True}, {"packed": True}


@functools.cache
def plain_products(kernel, capability, head_dim):
    return check(kernel, capability, head_dim, "bf16").ptx.count("mma.")


@pytest.mark.versions
@pytest.mark.parametrize(
    ("capability", "head_dim", "seen"),
    [
        *((90, 64, seen) for seen in (WINDOW, PACKED, WINDOW | PACKED)),
        (80, 128, WINDOW | PACKED),
        *(pytest.param(80, 128, seen, marks=pytest.mark.table) for seen in (WINDOW, PACKED)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_kernels_compile_for_windows_and_documents(kernel, capability, head_dim, seen):
    compiled = check(kernel, capability, head_dim, "bf16", **seen)
    assert compiled.ptx.count("mma.") > plain_products(kernel, capability, head_dim)


@pytest.mark.table
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("head_dim", tiles.HEAD_DIMS)
@pytest.mark.parametrize("capability", sorted(tiles.TABLE))
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_whole_table(kernel, capability, head_dim, dtype):
    if capability == 75:  # Turing has neither bf16 nor TF32 tensor cores
        dtype = {"bf16": "fp16", "tf32": "fp32"}.get(dtype, dtype)
        if dtype == "fp32" and head_dim == 256:
            with pytest.raises(ValueError, match=r"head dimension 256 in fp32 does not fit.*up to 128"):
                tiles.tiles("backward_keys", capability, head_dim, dtype)
            return
    check(kernel, capability, head_dim, dtype)


OF_FEW = [
    (kernel, generation, d, precision)
    for generation, kernels in tiles.FEW.items()
    for kernel, precisions in kernels.items()
    for precision, rows in precisions.items()
    for d in rows
]


@pytest.mark.table
@pytest.mark.parametrize(("kernel", "generation", "head_dim", "precision"), OF_FEW)
def test_tiles_of_few_programs(kernel, generation, head_dim, precision):
    check(kernel, generation, head_dim, {"half": "bf16"}.get(precision, precision), programs=0)


def on_a_gpu(heads, queries, keys, head_dim):
    """q and k, as far as tables look at them."""
    device = types.SimpleNamespace(type="cuda", index=0)
    return [types.SimpleNamespace(device=device, shape=(1, heads, n, head_dim)) for n in (queries, keys)]


def test_few_programs_are_made_more(monkeypatch):
    """Programs in tiles of few have fewer rows; they run while the table's would leave multiprocessors idle."""
    monkeypatch.setattr(tiles, "capability_of", lambda index: 90)
    monkeypatch.setattr(tiles, "multiprocessors_of", lambda index: 132)

    def chosen(kernel, heads, queries, keys, precision="tf32", head_dim=128):
        return tiles.tiles_for(kernel, *on_a_gpu(heads, queries, keys, head_dim), precision)

    for kernel, generation, head_dim, precision in OF_FEW:
        many, few = (tiles.tiles(kernel, generation, head_dim, precision, x) for x in (math.inf, 0))
        rows, enough = tiles.rows_of(kernel, many), int(132 * few.below)
        assert tiles.rows_of(kernel, few) < rows and enough in (33, 66, 132)
        for heads, length, expected in (
            (1, (enough - 1) * rows, few), (enough - 1, rows, few), (enough, 1, many), (1, enough * rows, many),
        ):  # fmt: skip
            lengths = (7, length) if kernel == "backward_keys" else (length, 7)
            assert chosen(kernel, heads, *lengths, precision, head_dim) == expected
        # what the launchers for Hopper leave to these kernels is reckoned in programs of so many rows
        least = {("fp32", "forward"): 16}.get((precision, kernel), 32 if precision == "half" else math.inf)
        if head_dim > least:
            assert tiles.rows_of(kernel, few) == tiles.FEW_ROWS
    assert chosen("forward", 1, 7, 7, "half", 256) == tiles.tiles("forward", 90, 256, "half")


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_keys_of_a_group_take_tiles_that_do_not_spill(head_dim, monkeypatch):
    monkeypatch.setattr(tiles, "capability_of", lambda index: 90)
    monkeypatch.setattr(tiles, "multiprocessors_of", lambda index: 132)
    q, k = on_a_gpu(64, 4096, 4096, head_dim)[0], on_a_gpu(16, 4096, 4096, head_dim)[1]
    chosen, alone = (tiles.tiles_for("backward_keys", of, k, "half") for of in (q, k))
    assert alone == tiles.tiles("backward_keys", 90, head_dim, "half") and (chosen == alone) == (
        head_dim == 128
    )
    variant = {"heads_per_kv": 4}
    compiled = compiler().submit(_compile, "backward_keys", 90, head_dim, "bf16", chosen, variant).result()
    assert compiled.spill_bytes <= SPILL_BYTES and not compiled.faults


@pytest.mark.versions
@pytest.mark.parametrize("without", ["dv", "dk"])
@pytest.mark.parametrize("at", tiles.APART)
def test_dk_and_dv_apart_do_not_spill(at, without):
    capability, _, head_dim = at
    chosen = tiles.APART[at][without == "dk"]
    variant = {"without": without, "even": False}
    compiled = (
        compiler().submit(_compile, "backward_keys", capability, head_dim, "bf16", chosen, variant).result()
    )
    assert compiled.spill_bytes == 0 and not compiled.faults and "wgmma.mma_async" in compiled.ptx
    assert compiled.shared_bytes <= tiles.SHARED_MEMORY_KIB[capability] * 1024


def test_dk_and_dv_are_apart_where_programs_are_enough(monkeypatch):
    monkeypatch.setattr(tiles, "capability_of", lambda index: 90)
    monkeypatch.setattr(tiles, "multiprocessors_of", lambda index: 132)
    of_d256 = tiles.APART[90, "half", 256]
    for heads, keys, head_dim, precision, expected in (
        (132, 128, 136, "half", of_d256), (66, 129, 256, "half", of_d256), (131, 128, 192, "half", None),
        (132, 4096, 128, "half", None), (132, 4096, 256, "fp32", None),
    ):  # fmt: skip
        assert tiles.apart_for(*on_a_gpu(heads, 7, keys, head_dim), precision) == expected
    monkeypatch.setattr(tiles, "capability_of", lambda index: 100)
    assert tiles.apart_for(*on_a_gpu(132, 7, 128, 256), "half") is None


def test_keys_are_split_where_queries_are_few(monkeypatch):
    monkeypatch.setattr(tiles, "multiprocessors_of", lambda index: 132)

    def splits(heads, queries, keys):
        return tiles.splits_for(*on_a_gpu(heads, queries, keys, 64))

    assert splits(16, 128, 16384) == 16  # 256 programs for 132 multiprocessors
    assert splits(64, 16, 8192) == 4
    assert splits(1, 1, 10**6) == tiles.MAX_SPLITS
    assert splits(16, 128, 1024) == 2  # 512 keys of a program at least
    assert splits(256, 64, 4096) == splits(16, 4096, 4096) == splits(1, 1, 1023) == 1

    def rows(heads, queries, keys):
        return tiles.tiles_for("forward", *on_a_gpu(heads, queries, keys, 64), "half").block_m

    monkeypatch.setattr(tiles, "capability_of", lambda index: 90)
    assert [rows(256, n, 4096) for n in (16, 17, 64, 65)] == [16, 64, 64, 128]  # 65: keys are not split
    assert rows(4, 512, 65536) == 64 and rows(256, 64, 255) == rows(256, 64, 511) == 128


def test_every_generation_has_every_row():
    for kernels in tiles.TABLE.values():
        for kernel in tiles.KERNELS:
            for precision in tiles.PRECISIONS:
                assert len(kernels[kernel][precision]) == len(tiles.HEAD_DIMS)


def test_a_gpu_between_generations_takes_the_older_rows():
    assert tiles.generation(89) == 86
    assert tiles.generation(103) == 100
    assert tiles.tiles("forward", 90, 80, "half") == tiles.TABLE[90]["forward"]["half"][3]
    with pytest.raises(ValueError, match=r"7\.0 is too old.*7\.5"):
        tiles.generation(70)
