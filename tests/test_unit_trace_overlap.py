"""What overlaps in a trace: sums of intervals, phases, files."""

import dataclasses
import json

import pytest

from cs336_systems.measure.trace.events import Kernel, Range, Trace
from cs336_systems.measure.trace.overlap import from_dict, from_json, merged, overlap, to_json

PHASES = ("forward", "backward", "synchronization", "optimizer")
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MS = 1_000_000


def kernel(name, start, end, launched, process=1, thread=1, stream=7):
    return Kernel(name, start * MS, end * MS, 0, stream, launched * MS, process, thread)


def ranges(process=1):
    spans = [("rank 0", 0, 100), ("way", 0, 100), ("step", 10, 60), ("forward", 10, 15), ("backward", 15, 25)]
    spans += [("synchronization", 25, 30), ("optimizer", 30, 60)]
    return [Range(name, start * MS, end * MS, process, 1) for name, start, end in spans]


def trace():
    kernels = [
        kernel("gemm", 11, 20, 11),
        kernel("gemm", 20, 40, 16, thread=2),  # backward, by autograd's thread
        kernel(NCCL, 25, 35, 17, thread=2, stream=20),
        kernel(NCCL, 38, 50, 18, thread=2, stream=20),
        kernel("multi_tensor_apply_kernel", 50, 58, 31),
        kernel("gemm", 26, 39, 20, process=2),  # another rank
    ]
    return Trace("nsys", tuple(kernels), tuple(ranges()))


def test_sums_of_a_step():
    [step] = overlap(trace(), "rank 0/way/step", PHASES)
    assert (step.communication_ms, step.compute_ms) == (22, 37)
    assert (step.overlap_ms, step.backward_overlap_ms) == (12, 12)
    assert step.collectives == 2 and step.length_ms == 50
    assert dict((name, (start, length)) for name, start, length in step.phases) == {
        "forward": (1 * MS, 9 * MS), "backward": (10 * MS, 20 * MS), "optimizer": (40 * MS, 8 * MS),
    }  # fmt: skip
    assert step.compute == ((1 * MS, 29 * MS), (40 * MS, 8 * MS))
    assert step.communication == ((15 * MS, 10 * MS), (28 * MS, 12 * MS))


def test_gaps_too_short_to_see_are_closed():
    first, second = kernel("gemm", 11, 20, 11), kernel("gemm", 20, 30, 12)
    second = second._replace(start_ns=second.start_ns + MS // 50)
    [step] = overlap(Trace("nsys", (first, second), tuple(ranges())), "step", PHASES)
    assert step.compute == ((1 * MS, 19 * MS),) and step.compute_ms == pytest.approx(18.98)


def test_a_phase_that_comes_twice_is_both():
    halves = [Range("backward", t * MS, (t + 5) * MS, 1, 1) for t in (15, 20)]
    all_ranges = [*(r for r in ranges() if r.name != "backward"), *halves]
    kernels = (
        kernel("gemm", 20, 30, 16), kernel(NCCL, 25, 45, 17, stream=20), kernel("gemm", 35, 40, 21),
    )  # fmt: skip
    [step] = overlap(Trace("nsys", kernels, tuple(all_ranges)), "step", PHASES)
    assert step.backward_overlap_ms == step.overlap_ms == 10
    assert step.phases == (("backward", 10 * MS, 20 * MS),)


def test_each_of_two_steps_has_phases_of_its_own():
    first = trace()
    later = [r._replace(start_ns=r.start_ns + 60 * MS, end_ns=r.end_ns + 60 * MS) for r in ranges()[2:]]
    kernels = (kernel("gemm", 85, 105, 76, thread=2), kernel(NCCL, 95, 110, 77, thread=2, stream=20))
    both = Trace("nsys", (*first.kernels, *kernels), (*first.ranges, *later))
    alone, second = overlap(both, "step", PHASES)
    assert alone == overlap(first, "step", PHASES)[0]
    assert (second.communication_ms, second.overlap_ms, second.backward_overlap_ms) == (15, 10, 10)
    assert second.phases == (("backward", 15 * MS, 20 * MS),)


def test_nothing_sent_overlaps_nothing():
    kernels = tuple(k for k in trace().kernels if k.name != NCCL)
    [step] = overlap(Trace("nsys", kernels, tuple(ranges())), "step", PHASES)
    assert step.communication_ms == step.overlap_ms == 0
    with pytest.raises(ValueError, match="no range 'nothing'"):
        overlap(trace(), "nothing")


def test_gloo_speaks_for_itself_on_a_cpu():
    sent = [Range("gloo:all_reduce", 14 * MS, end * MS, process, 5) for process, end in ((1, 30), (2, 40))]
    asked = Kernel("c10d::allreduce_", 13 * MS, 14 * MS, 0, 0, 13 * MS, 1, 1, 1 * MS)
    work = Kernel("aten::mm", 15 * MS, 20 * MS, 0, 0, 15 * MS, 1, 1, 5 * MS)
    [step] = overlap(Trace("torch-cpu", (asked, work), (*ranges(), *sent)), "step", PHASES)
    assert (step.communication_ms, step.compute_ms, step.overlap_ms) == (16, 5, 5)
    assert step.collectives == 1


def test_intervals_are_merged():
    assert merged([], 0, 5) == ()
    assert merged([(10, 20), (15, 18), (22, 30), (40, 41)], 10, 2) == ((0, 20), (30, 1))
    assert merged([(10, 20), (15, 18), (22, 30), (40, 41)], 10, 1) == ((0, 10), (12, 8), (30, 1))


def test_files_hold_all_ranks(tmp_path):
    steps = overlap(trace(), "step", PHASES) * 2
    path = tmp_path / "step.json"
    to_json(steps, path)
    assert from_json(path) == steps
    assert from_dict(json.loads(json.dumps(dataclasses.asdict(steps[0])))) == steps[0]
    assert path.stat().st_size < 2000
