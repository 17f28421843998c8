"""Chapter fsdp: its grid, what its steps hold and expose on two ranks against the closed forms, what fails alone."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cs336_systems import accounting, chapters
from cs336_systems.accounting import fsdp as closed
from cs336_systems.accounting.memory import memory_moments
from cs336_systems.chapters.fsdp import measure as fsdp
from cs336_systems.chapters.fsdp import ranks as on_ranks
from cs336_systems.chapters.fsdp import show
from cs336_systems.chapters.fsdp.measure import Case
from cs336_systems.measure.trace import overlap
from cs336_systems.measure.trace.events import Kernel, Range, Trace
from cs336_systems.sizes import size
from cs336_systems.store import machine, rows

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
pytestmark = pytest.mark.usefixtures("forked")
TINY = Case("tiny", 64, "fsdp", dtype="fp32")


def laptop(case):
    """A made-up result of a case on a CPU, for tests/test_chapters.py."""
    step = {f"{phase}_ms_p50": 10.0 for phase in (*fsdp.PHASES, "step")}
    return step | {"tokens_per_s": 100.0, "loss": 9.0, "backend": "gloo"}


# ------------------------------------------------------------------------------------------------ measured
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_smoke_agrees_with_the_closed_forms(smoke):
    found, root = smoke[0].to_dict("records"), smoke[1]
    assert len(found) == len(fsdp.grid("smoke")) and {row["status"] for row in found} == {"ok"}
    timed = [row for row in found if row["kind"] == "time"]
    for row in timed:
        kind = row["wrapper"] if row["wrapper"] in closed.KINDS else "fsdp"
        for part, num_bytes in closed.held_bytes(size("tiny"), kind, 2).items():
            # torch shards the gains of norms, too
            assert row[f"{part}_bytes"] == pytest.approx(num_bytes, rel=0 if kind == row["wrapper"] else 1e-3)
        assert row["loss"] == pytest.approx(timed[0]["loss"], rel=1e-5), row["wrapper"]
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 64 / row["step_ms_p50"] * 1e3, rel=1e-4)
    for row in (row for row in found if row["kind"] == "trace"):
        assert 0 < row["exposed_ms"] <= row["communication_ms"] < row["traced_ms"]
        parts = [row[f"{part}_exposed_ms"] for part in ("forward", "backward", "rest")]
        assert sum(parts) == pytest.approx(row["exposed_ms"], rel=1e-3)
        assert 0 <= row["forward_late"] <= row["forward_gathers"]
        case = dataclasses.replace(TINY, wrapper=row["wrapper"], kind="trace")
        assert len(overlap.from_json(rows.file_beside(fsdp.TABLE, case, machine.machine_name(), root))) == 2
    ours = next(row for row in found if row["kind"] == "trace" and row["wrapper"] == "fsdp")
    assert ours["forward_gathers"] == 4  # the embedding, two blocks, the head
    chapter = chapters.read("fsdp", machine=machine.machine_name(), preset="smoke", root=root)
    drawn = show.drawn(chapter, TINY.context_length, "fsdp")
    assert (
        len(drawn) == 2 and (drawn["exposed_ms"] > 0).all() and (drawn["exposed_ms"] < drawn["step_ms"]).all()
    )


def test_exposed_is_what_runs_alone_by_the_phase_in_which_it_does():
    ranges = [Range("step", 0, 100, 1, 1), Range("forward", 0, 10, 1, 1), Range("backward", 10, 20, 1, 1)]
    gather, scatter = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)"
    million = 1_000_000
    spans = [  # start, end, launched, stream; a cast of a message is no compute
        ("gemm", 20, 40, 1, 7), (gather, 10, 20, 2, 8), (gather, 30, 40, 3, 8), (gather, 36, 50, 4, 8),
        (gather, 39, 48, 11, 8),  # the first of backward
        ("copy_kernel", 40, 50, 4, 9), ("gemm", 50, 60, 11, 7), (scatter, 55, 70, 12, 10), ("gemm", 80, 90, 30, 7),
        (scatter, 85, 95, 31, 10),
    ]  # fmt: skip
    kernels = [
        Kernel(name, a * million, b * million, 0, stream, launched, 1, 1)
        for name, a, b, launched, stream in spans
    ]
    found = on_ranks.exposed(Trace("torch", tuple(kernels), tuple(ranges)), 0)
    assert found == {
        "traced_ms": 95.0, "communication_ms": 10 + 20 + 15 + 10, "exposed_ms": 10 + 10 + 10 + 5,
        "forward_exposed_ms": 10.0, "backward_exposed_ms": 10.0, "rest_exposed_ms": 15.0,
        "forward_gathers": 3, "forward_gather_ms": 30.0, "forward_late": 2,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus(results_root):
    group = [Case("tiny", 64, w, dtype=dtype) for dtype in ("bf16", "tf32") for w in fsdp.WRAPPERS]
    for narrow in (group[:6], group[6:]):
        found = list(fsdp.run_group(narrow))
        assert not [row for row in found if "status" in row]
        for row in found:
            assert row["backend"] == "nccl" and 0 < row["after_bytes"] <= row["peak_bytes"]
            assert row["loss"] == pytest.approx(found[0]["loss"], rel=1e-2)
    traced = [dataclasses.replace(case, kind="trace") for case in group[2:5:2]]
    for row in fsdp.run_group(traced):
        assert "status" not in row and row["source"] == "torch" and row["forward_gathers"] > 0


# ------------------------------------------------------------------------------------------------ closed forms
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_what_is_held_is_an_nth_of_what_is_sharded(ranks):
    config = size("xl")
    plain, sharded, whole = (closed.held_bytes(config, kind, ranks) for kind in ("ddp", "sharded", "fsdp"))
    norms = 4 * 97 * 1600
    assert whole["parameters"] == math.ceil((plain["parameters"] - norms) / 4 / ranks) * 4 + norms
    assert plain["parameters"] == sharded["parameters"] == plain["gradients"] and sharded["gradients"] > 4e9
    assert sum(whole.values()) <= sum(sharded.values()) <= sum(plain.values())
    if ranks == 1:
        assert plain == sharded == whole
    sent = [sum(closed.sent_bytes(config, kind, ranks).values()) for kind in ("ddp", "fsdp")]
    assert ranks == 1 or sent[1] / sent[0] == pytest.approx(1.5, rel=0.01)
    for kind in ("ddp", "sharded"):
        phases = accounting.zero_step_bytes(kind, ranks, plain["parameters"], plain["gradients"])
        found = closed.sent_bytes(config, kind, ranks)
        assert tuple(found.values()) == pytest.approx((0, *phases.values()))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_sent_is_what_the_collectives_are_given(ranks, dtype, monkeypatch):
    """By a group that sends nothing, of sizes that the ranks divide."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from cs336_systems.measure.counters.collectives import Collectives
    from cs336_systems.model import build
    from cs336_systems.parallel import shards
    from cs336_systems.parallel.fsdp import FullyShardedDataParallel

    monkeypatch.setattr(shards, "_group_of_gathers", lambda group, device: group)
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    config = dataclasses.replace(size("tiny"), num_layers=3, vocab_size=200, num_kv_heads=2)
    model = build(config, "reference")
    wrapped = FullyShardedDataParallel(model, compute_dtype=dtype, units=model.layers)
    with Collectives() as forward:
        loss = wrapped(torch.zeros(2, 8, dtype=torch.long)).float().mean()
    with Collectives() as backward:
        loss.backward()
        wrapped.finish_gradient_synchronization()
    torch.distributed.destroy_process_group()

    def sent(by):  # of n shards and the whole, n - 1 shards; of a tensor 2(n - 1)/n
        halves = by.num_bytes("all_gather") + by.num_bytes("reduce_scatter")
        return (ranks - 1) * (halves / (ranks + 1) + 2 * by.num_bytes("all_reduce") / ranks)

    expected = closed.sent_bytes(config, "fsdp", ranks, dtype.itemsize)
    assert sent(forward) == expected["forward"]
    assert sent(backward) == pytest.approx(expected["backward"], abs=200)  # what the ranks agree on, too


def test_the_peak_of_one_rank_is_that_of_training_on_one_device():
    config = dataclasses.replace(size("tiny"), context_length=256)
    for sequence in (16, 256):
        alone = memory_moments(config, 2, sequence, "train_step", optimizer="fused")
        peak = closed.step_peak_bytes(config, 2, sequence, "fsdp", 1)
        counters = 4 * 21
        assert sum(peak.values()) == max(sum(items.values()) for items in alone.values()) + counters
    with pytest.raises(ValueError, match="kind"):
        closed.step_peak_bytes(config, 2, 16, "zero3", 1)


@pytest.mark.parametrize("num_kv_heads", [None, 1])
def test_a_unit_is_a_blocks_weights_without_the_norms(num_kv_heads):
    from cs336_systems.model import build

    config = dataclasses.replace(size("tiny"), num_kv_heads=num_kv_heads)
    weights = sum(p.numel() for p in build(config, device="meta").layers[0].parameters() if p.ndim == 2)
    assert set(closed.unit_sizes(config)[1:-1]) == {weights}
