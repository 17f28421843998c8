"""GPU traces: exports of Nsight Systems and recordings of torch's profiler, made up here with known answers; torch's
profiler for real, on the CPU. No GPU, and no Nsight Systems."""

import ast
import contextlib
import dataclasses
import gzip
import json
import os
import random
import re
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pytest

import cs336_systems
from cs336_systems.measure.trace import condensed, kernels, nsys
from cs336_systems.measure.trace.condensed import Step, condense
from cs336_systems.measure.trace.events import NEVER, Kernel, Range, Trace, kernel_table, union_ns, usage
from cs336_systems.measure.trace.kernels import CLASSES, class_of, short_name
from cs336_systems.measure.trace.nsys import read_nsys
from cs336_systems.measure.trace.profiler import DEVICE, read_torch, record_torch, span
from cs336_systems.store import process as measure_process
from cs336_systems.store.status import Skip

GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas"  # noqa: E501
MUL = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)3>>(int, T2, T3)"
)
SOFT = (
    "void at::native::<unnamed>::cunn_SoftMaxForward<(int)4, float, float, float, "
    "at::native::<unnamed>::SoftMaxForwardEpilogue>(T4 *, const T2 *, int)"
)
PRODUCT, PRODUCT_NAME = "matrix product", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n 128x128x8"
MAIN, AUTOGRAD = 4321, 4399  # threads
PROCESS = 4321


# ------------------------------------------------------------------------------------- an export of Nsight Systems
ACTIVITY = "start, end, deviceId, contextId, streamId, correlationId, globalPid"
SCHEMA = {  # as `nsys export` 2024 and 2025 write it, without columns that do not matter here
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{ACTIVITY}, demangledName, shortName, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{ACTIVITY}, bytes, copyKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{ACTIVITY}, value, bytes",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, eventClass, globalTid, correlationId, nameId, returnValue",
    "NVTX_EVENTS": "start, end, eventType, text, globalTid, textId, domainId",
}
COPIES, FILLS = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
KERNELS, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"


def global_id(thread=0):
    return (1 << 48) | (PROCESS << 24) | thread


class Export:
    """Rows of the tables, and the file they make; a table without rows does not exist, as with nsys."""

    def __init__(self):
        self.rows = {name: [] for name in SCHEMA}
        self.strings, self.calls = {}, 0

    def string(self, value):
        return self.strings.setdefault(value, len(self.strings) + 1)

    def call(self, start, thread=MAIN):
        self.calls += 1
        self.rows[RUNTIME].append(
            {"start": start, "end": start + 4, "globalTid": global_id(thread), "correlationId": self.calls}
        )
        return self.calls

    def activity(self, table, start, end, call, stream=7, **more):
        place = {"deviceId": 0, "contextId": 1, "streamId": stream, "globalPid": global_id()}
        self.rows[table].append({"start": start, "end": end, "correlationId": call, **place, **more})

    def kernel(self, name, start, end, launched=None, thread=MAIN, call=None, **more):
        more |= {"demangledName": self.string(name), "shortName": self.string("short")}
        self.activity(KERNELS, start, end, call or self.call(launched, thread), **more)

    def range(self, name, start, end, event=59, registered=False):
        named = {"textId": self.string(name)} if registered else {"text": name}
        row = {"start": start, "end": end, "eventType": event, "globalTid": global_id(MAIN), "domainId": 0}
        self.rows[NVTX].append(row | named)

    def read(self, tmp_path):
        self.rows["StringIds"] = [{"id": i, "value": value} for value, i in self.strings.items()]
        path = tmp_path / "a step?&#.sqlite"  # a name that would mean something else in a URI
        path.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            for table, rows in self.rows.items():
                if rows:
                    database.execute(f"CREATE TABLE {table} ({SCHEMA[table]})")
                for row in rows:
                    names, marks = ", ".join(f'"{name}"' for name in row), ", ".join("?" * len(row))
                    database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values()))
        before = path.read_bytes()
        try:
            return read_nsys(path)
        finally:
            assert path.read_bytes() == before


def training(steps=2):
    """Steps of 1000 ns: a forward pass, a backward pass by autograd's thread, an optimizer; kernels run late."""
    export = Export()
    for step in range(steps):
        t = 1000 * step
        export.range("step", t, t + 1000)
        export.range("forward", t + 10, t + 200)
        export.activity(COPIES, t + 20, t + 25, export.call(t + 12), bytes=64, copyKind=1)
        export.kernel(GEMM, t + 30, t + 130, t + 20)
        export.range("attention softmax", t + 50, t + 60, registered=True)
        export.kernel(SOFT, t + 140, t + 190, t + 55)  # runs when its range is long closed
        export.kernel(GEMM, t + 190, t + 290, t + 70)  # runs until after the end of `forward`
        export.range("backward", t + 300, t + 700)
        export.kernel(MUL, t + 310, t + 320, t + 305)
        export.kernel(GEMM, t + 330, t + 480, t + 325, AUTOGRAD)
        export.kernel(GEMM, t + 470, t + 620, t + 335, AUTOGRAD, stream=13)
        export.range("optimizer", t + 800, t + 990)
        export.activity(FILLS, t + 810, t + 815, export.call(t + 801), value=0, bytes=4)
        export.kernel(MUL, t + 820, t + 900, t + 802)
    return export


def calls(trace, name):
    return {use.name: use.calls for use in kernel_table(trace, name)}


def test_a_kernel_belongs_to_the_ranges_open_at_its_launch(tmp_path):
    trace = training().read(tmp_path)
    assert trace.source == "nsys" and len(trace.kernels) == 18
    assert Counter(trace.paths) == dict.fromkeys(
        ["step", "step/forward", "step/forward/attention softmax", "step/backward", "step/optimizer"], 2
    )
    assert calls(trace, "forward") == {PRODUCT_NAME: 4, "softmax forward": 2, "memcpy HtoD": 2}
    assert calls(trace, "attention softmax") == calls(trace, "forward/attention softmax")
    assert calls(trace, "attention softmax") == {"softmax forward": 2}
    assert calls(trace, "backward") == {PRODUCT_NAME: 4, "elementwise: mul": 2}
    assert calls(trace, "optimizer") == {"elementwise: mul": 2, "memset": 2}
    assert sum(calls(trace, "step").values()) == 18
    times = [kernel.start_ns for kernel in trace.kernels]
    assert times == sorted(times) and {kernel.device for kernel in trace.kernels} == {0}
    [product, softmax, copy] = kernel_table(trace, "forward")
    assert (product.kind, copy.kind) == (PRODUCT, "memcpy/memset")
    assert (product.total_ms, softmax.total_ms) == (400e-6, 100e-6)
    for wrong in ("forwards", "rward"):  # the end of a name is no name
        with pytest.raises(
            ValueError, match=f"no range '{wrong}'; allowed: step, step/forward, step/forward/a"
        ):
            kernel_table(trace, wrong)


def test_a_range_without_kernels_is_empty():
    trace = Trace("nsys", (), (Range("wait", 0, 10, 1, 1),))
    assert kernel_table(trace, "wait") == []
    empty = usage(trace, "wait")
    assert empty.host_ms == 10e-6 and empty.busy_ms == empty.idle_ms == empty.kernels == 0
    with pytest.raises(ValueError, match="no range 'x'; allowed: none was recorded"):
        usage(Trace("nsys", (), ()), "x")


# ------------------------------------------------------------------------------------------------- whose launch
def random_trace(rng, threads=3):
    """Nested ranges on each thread, and launches anywhere; small numbers, many ties."""
    ranges, launched = [], []

    def nest(low, high, pid, thread, depth):
        at = low
        while depth < 4 and at < high and rng.random() < 0.8:
            start = rng.randint(at, high - 1)
            end = rng.randint(start + 1, high)
            ranges.append(Range(rng.choice("abcd"), start, end, pid, thread))
            nest(start, end, pid, thread, depth + 1)
            at = end + rng.randint(0, 2)

    for pid in (1, 2):
        for thread in range(threads):
            nest(0, 60, pid, thread, 0)
    for i in range(rng.randint(0, 60)):
        t = rng.choice([NEVER, rng.randint(0, 62)])
        start = rng.randint(0, 90)
        where = (rng.randrange(2), rng.choice([7, 13]))
        who = (rng.choice([1, 2]), -1 if t == NEVER else rng.randrange(threads))
        launched.append(
            Kernel(rng.choice([GEMM, f"s{i}"]), start, start + rng.randint(0, 9), *where, t, *who)
        )
    rng.shuffle(ranges)
    rng.shuffle(launched)
    return Trace("nsys", tuple(launched), tuple(ranges))


def plainly_owned(trace, mine, kernel):
    """The rule of `events`' docstring, said once more without any cleverness."""

    def is_open(found):
        return found.start_ns <= kernel.launched_ns < found.end_ns

    if kernel.process != mine.process or not is_open(mine):
        return False
    own = [r for r in trace.ranges if (r.process, r.thread) == (kernel.process, kernel.thread) and is_open(r)]
    outside = [r for r in own if not mine.start_ns <= r.start_ns <= r.end_ns <= mine.end_ns]
    return kernel.thread == mine.thread or not outside


@pytest.mark.parametrize("seed", range(30))
def test_ownership_and_usage_as_the_rules_say(seed):
    trace = random_trace(random.Random(seed))
    for i, mine in enumerate(trace.ranges):
        owned = [k for k, kernel in enumerate(trace.kernels) if plainly_owned(trace, mine, kernel)]
        assert list(trace.owned(i)) == owned
        parent = trace.parents[i]
        if parent >= 0:
            outer = trace.ranges[parent]
            assert outer.start_ns <= mine.start_ns and mine.end_ns <= outer.end_ns
            assert (outer.process, outer.thread) == (mine.process, mine.thread) and parent < i
    for name in set(trace.paths) | {mine.name for mine in trace.ranges}:
        use, all_of_them = usage(trace, name), [trace.ranges[i] for i in trace.find(name)]
        owned = [[k for k in trace.kernels if plainly_owned(trace, mine, k)] for mine in all_of_them]
        found = {id(k): k for kernels in owned for k in kernels}.values()
        devices = {k.device for k in found}
        running = {t for k in trace.kernels if k.device in devices for t in range(k.start_ns, k.end_ns)}
        busy = {t for k in found for t in range(k.start_ns, k.end_ns)}
        due = {
            t for kernels in owned if kernels
            for t in range(min(k.launched_ns for k in kernels), max(k.end_ns for k in kernels))
        }  # fmt: skip
        kernel_ns, host_ns = (sum(x.end_ns - x.start_ns for x in one) for one in (found, all_of_them))
        assert use.kernels == len(found) == sum(one.calls for one in kernel_table(trace, name))
        told = (use.host_ms, use.kernel_ms, use.busy_ms, use.idle_ms)
        assert told == pytest.approx([ns / 1e6 for ns in (host_ns, kernel_ns, len(busy), len(due - running))])


def test_the_union_of_intervals():
    assert union_ns([], []) == 0
    assert union_ns([2**52, 2**52 + 1], [2**52 + 3, 2**52 + 2]) == 3  # where floats end
    rng = random.Random(3)
    for _ in range(300):
        intervals = [(a, a + rng.randint(0, 8)) for a in rng.choices(range(-9, 50), k=rng.randint(1, 12))]
        covered = {t for a, b in intervals for t in range(a, b)}
        assert union_ns(*np.array(intervals).T) == len(covered)


# ------------------------------------------------------------------------------------- what an export may look like
def test_kernels_of_a_cuda_graph_belong_where_it_was_launched(tmp_path):
    export = Export()
    export.range("forward", 0, 100)
    launch = export.call(50)
    for i in range(3):
        export.kernel(GEMM, 200 + 10 * i, 205 + 10 * i, call=launch, graphNodeId=1000 + i)
    export.range("backward", 190, 300)  # in which they run
    export.kernel(MUL, 260, 270, 195)
    trace = export.read(tmp_path)
    assert calls(trace, "forward") == {PRODUCT_NAME: 3} and calls(trace, "backward") == {
        "elementwise: mul": 1
    }


def test_events_that_are_no_ranges_and_launches_that_are_missing(tmp_path):
    export = training(steps=1)
    export.range("start/end", 0, 1100, event=60)
    export.range("mark", 5, None, event=34)
    export.range("open", 5, None)
    export.range("domain", 5, 9, event=75)
    export.kernel(SOFT, 150, 160, call=999)
    trace = export.read(tmp_path)
    assert Counter(path.split("/")[-1] for path in trace.paths)["end"] == 1 and len(trace.ranges) == 6
    lost = [kernel for kernel in trace.kernels if kernel.launched_ns == NEVER]
    assert [(k.name, k.thread) for k in lost] == [(SOFT, -1)]
    assert calls(trace, "step")["softmax forward"] == 1


@pytest.mark.parametrize("outer_first", [True, False])
def test_the_outer_of_two_nested_calls_launches(tmp_path, outer_first):
    export = Export()
    export.range("forward", 0, 12)
    export.range("afterwards", 12, 20)
    for start in (10, 15) if outer_first else (15, 10):  # the runtime's call, and the driver's inside it
        export.call(start)
        export.calls = 0
    export.kernel(GEMM, 50, 60, call=1)
    trace = export.read(tmp_path)
    assert trace.kernels[0].launched_ns == 10 and calls(trace, "afterwards") == {}


def test_an_export_without_what_is_needed_is_refused(tmp_path):
    for table in (KERNELS, RUNTIME, NVTX):
        export = training()
        export.rows[table].clear()
        with pytest.raises(nsys.NsysError, match=f"no export of kernels, launches and ranges: .*{table}"):
            export.read(tmp_path)
    for contents in (None, b"PK" * 100):
        path = tmp_path / "t.sqlite"
        if contents:
            path.write_bytes(contents)
        with pytest.raises(nsys.NsysError, match=r"t\.sqlite is no export"):
            read_nsys(path)


# ------------------------------------------------------------------------------------------------ torch's profiler
def write_torch(path, events):
    path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
    return path


def torch_events():
    """A step as the profiler's Chrome trace tells it: µs with fractions, launches by runtime and driver, a graph."""
    on_gpu, copied = {"tid": 7, "device": 0, "stream": 7}, "Memcpy HtoD (Pinned -> Device)"
    rows = [
        ("user_annotation", "step", 1000.0, 100.0, {}),
        ("user_annotation", "forward", 1001.25, 20.5, {}),
        ("user_annotation", "backward", 1030.0, 50.0, {}),
        ("gpu_user_annotation", "forward", 1010.0, 90.0, {"tid": 7}),
        ("cpu_op", "aten::mm", 1002.0, 10.0, {}),
        ("cuda_runtime", "cudaLaunchKernel", 1003.0, 2.0, {"correlation": 11}),
        ("kernel", GEMM, 1010.5, 30.125, on_gpu | {"correlation": 11}),
        ("cuda_driver", "cuLaunchKernel", 1004.0, 1.0, {"correlation": 11}),
        ("cuda_driver", "cuLaunchKernelEx", 1031.0, 1.0, {"tid": 2, "correlation": 12}),
        ("kernel", "triton_poi_fused_mul_0", 1050.0, 4.0, on_gpu | {"correlation": 12}),
        ("cuda_runtime", "cudaGraphLaunch", 1060.0, 1.0, {"correlation": 13}),
        *(("kernel", SOFT, 1070.0 + 3 * i, 2.0, on_gpu | {"correlation": 13}) for i in range(2)),
        ("cuda_runtime", "cudaMemcpyAsync", 1015.0, 1.0, {"correlation": 14}),
        ("gpu_memcpy", copied, 1016.0, 2.0, on_gpu | {"correlation": 14}),
        ("gpu_memset", "Memset (Device)", 1090.0, 1.0, on_gpu | {"correlation": 99}),
    ]
    events = [{"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "python"}}]
    for kind, name, start, duration, args in rows:
        place = {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": args.pop("tid", 1)}
        events.append(place | {"ts": start, "dur": duration, "args": args})
    return events


def test_a_trace_of_torch(tmp_path):
    trace = read_torch(write_torch(tmp_path / "t.json.gz", torch_events()))
    assert trace.source == "torch"
    assert calls(trace, "forward") == {PRODUCT_NAME: 1, "memcpy HtoD": 1}
    assert calls(trace, "backward") == {"triton_poi_fused_mul_0": 1, "softmax forward": 2}
    assert trace.ranges[1] == Range("forward", 1_001_250, 1_021_750, 9, 1)
    assert trace.kernels[0] == Kernel(GEMM, 1_010_500, 1_040_625, 0, 7, 1_003_000, 9, 1)
    assert trace.kernels[-1][-4:-1] == (NEVER, -1, -1)
    events = [event for event in torch_events() if event.get("cat") not in DEVICE]
    trace = read_torch(write_torch(tmp_path / "t.json.gz", events))
    assert trace.source == "torch-cpu" and calls(trace, "forward") == {"aten::mm": 1}


def test_operators_have_the_time_of_their_own(tmp_path):
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": thread, "ts": start, "dur": duration}
        for name, start, duration, thread in [
            ("aten::copy_", 20, 5, 1),  # in no particular order
            ("aten::addmm", 10, 80, 1),
            ("aten::linear", 0, 100, 1),
            ("aten::relu", 100, 50, 1),
            ("aten::mm", 0, 70, 2),
            ("aten::t", 60, 10.002, 2),  # ends after its caller, as rounding does it
        ]
    ]
    events.append({"ph": "X", "cat": "user_annotation", "name": "f", "pid": 9, "tid": 1, "ts": 0, "dur": 160})
    trace = read_torch(write_torch(tmp_path / "t.json.gz", events))
    own = {kernel.name: kernel.work_ns for kernel in trace.kernels}
    assert own == {
        "aten::linear": 20_000, "aten::addmm": 75_000, "aten::copy_": 5_000, "aten::relu": 50_000,
        "aten::mm": 60_000, "aten::t": 10_002,
    }  # fmt: skip
    use = usage(trace, "f")
    assert use.kernel_ms == pytest.approx(0.220002) and use.busy_ms == pytest.approx(0.15)
    step = condense(trace, "f")
    assert [stream.label for stream in step.streams] == ["CPU thread 0", "CPU thread 1"]
    product, copy, elementwise = map(CLASSES.index, ("matrix product", "copy/cast", "elementwise"))
    assert list(pieces_of(step.streams[0])) == [  # the innermost operator has the time
        (0, 10_000, product), (10_000, 10_000, product), (20_000, 5_000, copy), (25_000, 65_000, product),
        (90_000, 10_000, product), (100_000, 50_000, elementwise),
    ]  # fmt: skip


def pieces_of(stream):
    """(start, length, class) of what ran on a stream."""
    return zip(stream.starts_ns, stream.lengths_ns, stream.kinds, strict=True)


def test_recording_with_torch_for_real(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 64)

    def steps():
        for _ in range(3):
            with span("step"):
                with span("forward"):
                    hidden = model(x)
                    with span("attention softmax"):
                        loss = torch.softmax(hidden, -1).square().sum()
                with span("backward"):
                    loss.backward()
                with span("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()

    trace = record_torch(steps, keep=tmp_path / "kept" / "trace.json.gz")
    assert [len(trace.find(name)) for name in ("step", "forward", "forward/attention softmax")] == [3, 3, 3]
    assert read_torch(tmp_path / "kept" / "trace.json.gz") == trace
    if trace.source != "torch-cpu":
        assert torch.cuda.is_available()
        return
    forward = {use.name: use for use in kernel_table(trace, "forward")}
    assert forward["aten::addmm"].calls == 3 and forward["aten::addmm"].kind == "matrix product"
    assert forward["aten::_softmax"].calls == 3 and "aten::mm" not in forward
    assert set(calls(trace, "attention softmax")) >= {"aten::_softmax", "aten::sum"}
    assert "aten::addmm" not in calls(trace, "attention softmax")
    backward = calls(trace, "backward")
    assert backward["aten::mm"] == 3 and backward["aten::_softmax_backward_data"] == 3
    assert calls(trace, "optimizer")["aten::addcdiv_"] == 6  # weight and bias
    use = usage(trace, "step")
    assert 0 < use.kernel_ms <= use.host_ms and 0 < use.busy_ms <= use.busy_ms + use.idle_ms <= use.host_ms
    with pytest.raises(ZeroDivisionError):
        record_torch(lambda: 1 / 0)


# ------------------------------------------------------------------------------------------------ names of kernels
# Names as Nsight Systems (`<unnamed>`, `(int)4`) and torch's profiler (`(anonymous namespace)`, `4`) print them for
# models like this project's on A100, H100 and H200; long arguments that decide nothing are cut.
NAMES = [
    ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN", "matrix product", "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN"),  # noqa: E501
    (GEMM, "matrix product", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n 128x128x8"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_tn_align1>(T1::Params)", "matrix product", "cutlass_80_simt_sgemm_128x256_8x4_tn_align1"),  # noqa: E501
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", "matrix product", "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn"),  # noqa: E501
    ("void gemmSN_TN_kernel<float, (int)128, (int)16, cublasGemvTensorStridedBatched<const float>>(T13)", "matrix product", "gemmSN_TN_kernel"),  # noqa: E501
    ("std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, float, float, float, float, (bool)0>(T13)", "matrix product", "gemvx"),  # noqa: E501
    ("void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, float, float, float, (bool)1>(cublasLt::cublasSplitKParams<T6>)", "matrix product", "splitKreduce_kernel"),  # noqa: E501
    ("triton_tem_fused_mm_t_3", "matrix product", "triton_tem_fused_mm_t_3"),
    ("triton_mm", "matrix product", "triton_mm"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>, false, true>(pytorch_flash::Flash_fwd_params)", "attention", "flash_fwd_kernel"),  # noqa: E501
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<(int)64, cutlass::bfloat16_t>>(pytorch_flash::Flash_bwd_params)", "attention", "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"),  # noqa: E501
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>(T1::Params)", "attention", "FlashAttnFwdSm90"),  # noqa: E501
    ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80>::Params)", "attention", "fmha_cutlassF_f32_aligned_64x64_rf_sm80"),  # noqa: E501
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0", "attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"),  # noqa: E501
    ("triton_tem_fused_add_flex_attention_mul_slice_16", "attention", "triton_tem_fused_add_flex_attention_mul_slice_16"),  # noqa: E501
    ("forward_kernel", "attention", "forward_kernel"), (SOFT, "softmax", "softmax forward"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxBackward<8, c10::Half, float, c10::Half, at::native::(anonymous namespace)::LogSoftMaxBackwardEpilogue>(c10::Half*, c10::Half const*, c10::Half const*, long)", "softmax", "log-softmax backward"),  # noqa: E501
    ("void <unnamed>::softmax_warp_forward<float, float, float, (int)9, (bool)0, (bool)0>(T2 *, const T1 *, int)", "softmax", "softmax forward"),  # noqa: E501
    (MUL, "elementwise", "elementwise: mul"),
    ("void at::native::elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::DivFunctor<float>>>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)", "elementwise", "elementwise: div"),  # noqa: E501
    ("void at::native::vectorized_elementwise_kernel<(int)4, at::native::AUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)2>>(int, T2, T3)", "elementwise", "elementwise: mul by a number"),  # noqa: E501
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<float>, std::array<char*, 2ul> >(int, at::native::CUDAFunctorOnSelf_add<float>, std::array<char*, 2ul>)", "elementwise", "elementwise: add a number"),  # noqa: E501
    ("void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, std::array<char *, (unsigned long)1>>(int, T2, T3)", "elementwise", "elementwise: fill"),  # noqa: E501
    ("void at::native::vectorized_elementwise_kernel<(int)4, at::native::rsqrt_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T3)", "elementwise", "elementwise: rsqrt"),  # noqa: E501
    ("void at::native::vectorized_elementwise_kernel<(int)4, void at::native::<unnamed>::pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase &, T2)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T3)", "elementwise", "elementwise: pow"),  # noqa: E501
    ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::(anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}::operator()() const::{lambda(float, bool)#1}>(at::TensorIteratorBase&)::{lambda(int)#1}>(int)", "elementwise", "elementwise: masked_fill"),  # noqa: E501
    ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::(anonymous namespace)::where_kernel_impl(at::TensorIterator&)::{lambda()#1}::operator()() const::{lambda(bool, c10::Half, c10::Half)#1}>(at::TensorIteratorBase&)>(int)", "elementwise", "elementwise: where"),  # noqa: E501
    ("void at::native::elementwise_kernel_manual_unroll<128, 8, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<c10::BFloat16> >(at::TensorIteratorBase&)>(int)", "elementwise", "elementwise: add"),  # noqa: E501
    ("void at::native::triu_tril_kernel<bool, int, (bool)0, (int)8, (bool)0>(at::cuda::detail::TensorInfo<T1, T2>)", "elementwise", "triu_tril_kernel"),  # noqa: E501
    ("void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, float, (int)4, (int)4>>(T3)", "reduction", "reduction: mean"),  # noqa: E501
    ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4> >(at::native::ReduceOp<float>)", "reduction", "reduction: sum"),  # noqa: E501
    ("void at::native::<unnamed>::vectorized_layer_norm_kernel<float, float, (bool)0>(int, T2, const T1 *)", "reduction", "vectorized_layer_norm_kernel"),  # noqa: E501
    ("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)", "reduction", "nll_loss_forward_reduce_cuda_kernel_2d"),  # noqa: E501
    ("void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]::operator ()() const::[lambda(float) (instance 1)]>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)", "copy/cast", "copy"),  # noqa: E501
    ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul> >(int)", "copy/cast", "copy: bfloat16"),  # noqa: E501
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::OpaqueType<4u>, unsigned int, 1, 128, 1>(at::native::(anonymous namespace)::OpaqueType<4u>*)", "copy/cast", "CatArrayBatchedCopy_contig"),  # noqa: E501
    ("triton_poi_fused__unsafe_view_mm_silu_4", "Triton, fused", "triton_poi_fused__unsafe_view_mm_silu_4"),
    ("void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadata<(int)2>, at::native::<unnamed>::BinaryOpListAlphaFunctor<float, (int)2, (int)2, (int)0>, std::plus<float>, float>(T1, T2, T3...)", "optimizer", "foreach add"),  # noqa: E501
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<3>, at::native::(anonymous namespace)::PointwiseOpScalarFunctor<float, 3, 3, 0>, std::multiplies<float>, float>(float)", "optimizer", "foreach addcmul"),  # noqa: E501
    ("void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadata<(int)1>, at::native::<unnamed>::UnaryOpFunctor<float, (int)1, (int)1, (int)0>, at::native::Sqrt<float>>(T1, T2, T3...)", "optimizer", "foreach sqrt"),  # noqa: E501
    ("void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::FusedOptimizerTensorListMetadata<(int)4>, at::native::<unnamed>::FusedAdamMathFunctor<float, (int)4, (at::native::<unnamed>::ADAM_MODE)1, (bool)0>, const float *, double>(T1, T2, T3...)", "optimizer", "fused Adam"),  # noqa: E501
    ("void at::native::vectorized_gather_kernel<(int)16, long>(char *, char *, T2 *, int, long, long, long, long, bool)", "embedding/index", "vectorized_gather_kernel"),  # noqa: E501
    ("void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long const*)", "embedding/index", "embedding_backward_feature_kernel"),  # noqa: E501
    ("void at::native::index_elementwise_kernel<(int)128, (int)4, void at::native::gpu_index_kernel<void at::native::index_put_kernel_impl<at::native::OpaqueType<(int)4>>(at::TensorIterator &)>>(long, T3)", "embedding/index", "index_put"),  # noqa: E501
    ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy<long>>(long)", "embedding/index", "DeviceRadixSortOnesweepKernel"),  # noqa: E501
    ("[CUDA memcpy Host-to-Device]", "memcpy/memset", "memcpy HtoD"),
    ("Memcpy HtoD (Pageable -> Device)", "memcpy/memset", "memcpy HtoD"),
    ("[CUDA memset]", "memcpy/memset", "memset"), ("Memset (Device)", "memcpy/memset", "memset"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)", "communication", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),  # noqa: E501
    ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs4K)", "communication", "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32"),  # noqa: E501
    ("void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::DeviceScanPolicy<int>>(int)", "reduction", "DeviceScanKernel"),  # noqa: E501
    ("_rotary_tail_kernel", "other", "_rotary_tail_kernel"), ("[CUDA graph]", "other", "[CUDA graph]"),
    ("aten::mm", "matrix product", "aten::mm"),
    ("aten::_softmax_backward_data", "softmax", "aten::_softmax_backward_data"),
    ("aten::add_", "elementwise", "aten::add_"), ("aten::silu_backward", "elementwise", "aten::silu_backward"),
    ("aten::expand", "other", "aten::expand"),  # not `exp`
    ("aten::new_zeros", "other", "aten::new_zeros"),  # not `ne`
    ("aten::_to_copy", "copy/cast", "aten::_to_copy"), ("aten::mean", "reduction", "aten::mean"),
    ("aten::embedding_dense_backward", "embedding/index", "aten::embedding_dense_backward"),
    ("aten::_foreach_add_", "optimizer", "aten::_foreach_add_"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),  # noqa: E501
    ("autograd::engine::evaluate_function: MmBackward0", "other", "autograd::engine::evaluate_function: MmBackward0"),
]  # fmt: skip


def test_class_and_short_name():
    assert [(name, class_of(name), short_name(name)) for name, *_ in NAMES] == NAMES


def test_the_table_of_classes_is_whole():
    seen = {kind for _, kind, _ in NAMES}
    assert set(CLASSES) == {kind for kind, _ in kernels.RULES} | {kernels.OTHER} == seen
    assert len(set(CLASSES)) == len(CLASSES)
    found = [next((row for row in kernels.RULES if re.search(row[1], name)), None) for name, *_ in NAMES]
    assert len(set(found) - {None}) > 0.8 * len(kernels.RULES)


def test_our_own_kernels_are_attention():
    root = Path(cs336_systems.__file__).parent
    files = [path for folder in ("attention", "ladder") for path in (root / folder).rglob("*.*")]
    sources = "".join(path.read_text("utf-8") for path in files if path.suffix in (".py", ".cu"))
    launched = re.findall(r"jit(?:\([^@]*?\).*)?\ndef (\w+_kernel)\(", sources)
    launched += re.findall(r"__global__.* (\w+_kernel)\(", sources)
    assert len(set(launched)) > 20 and "alone_kernel" in launched  # whose decorator is the longest
    assert {name: class_of(name) for name in launched} == dict.fromkeys(launched, "attention")


# ----------------------------------------------------------------------------------------------------- condensing
def long_trace(steps=3, layers=60, seed=0):
    """Thousands of short kernels of changing classes on two streams, some long ones among them."""
    rng = random.Random(seed)
    operations, ranges, t = [], [], 0
    for step in range(steps):
        start = t
        for phase in ("forward", "backward"):
            begin = t
            for _ in range(layers):
                ranges.append(Range(f"attention {rng.choice(['scores', 'softmax'])}", t + 5, t + 60, 1, 1))
                for _ in range(20):
                    length = int(100 * 2 ** rng.uniform(0, 9 if rng.random() < 0.1 else 5))
                    name = rng.choice([GEMM, MUL, SOFT, "Memset", "forward_kernel"])
                    operations.append(Kernel(name, t + 10, t + 10 + length, 0, 7, t + 2, 1, 1))
                    t += length + rng.choice([10, 300])
                nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
                operations.append(Kernel(nccl, t - 500, t + 700, 0, 23, t - 900, 1, 2))
            ranges.append(Range(phase, begin, t, 1, 1))
        ranges.append(Range("step", start, t + 100 * step, 1, 1))
        t += 2000 + 100 * step
    return Trace("nsys", tuple(operations), tuple(ranges))


def test_the_step_of_median_length_is_condensed(tmp_path):
    export = training(steps=1)
    export.range("step", 3000, 3010)
    export.range("step", 4000, 9000)
    step = condense(export.read(tmp_path), "step")
    assert (step.source, step.path, step.length_ns) == ("nsys", "step", 1000)
    assert [stream.label for stream in step.streams] == ["stream 7", "stream 13"]
    assert step.streams[1].starts_ns == (470,) and step.streams[1].lengths_ns == (150,)
    kinds = [CLASSES[kind] for kind in step.streams[0].kinds]
    assert kinds[:3] == ["memcpy/memset", "matrix product", "softmax"] and len(kinds) == 8
    assert [(r.name, r.level, r.start_ns, r.length_ns) for r in step.ranges] == [
        ("step", 0, 0, 1000), ("forward", 1, 10, 190), ("attention softmax", 2, 50, 10),
        ("backward", 1, 300, 400), ("optimizer", 1, 800, 190),
    ]  # fmt: skip
    forward = condense(training().read(tmp_path), "forward")
    assert forward.length_ns == 280 and forward.ranges[0].name == "forward"  # to the end of its last kernel
    with pytest.raises(ValueError, match="no range 'x'"):
        condense(training().read(tmp_path), "x")


def test_a_step_is_read_back_from_a_small_file(tmp_path):
    trace, path = long_trace(steps=1, layers=160), tmp_path / "new" / "s.json"
    step = condense(trace, "step")
    assert sum(len(s.starts_ns) for s in step.streams) == len(trace.kernels) == 6_720
    step.to_json(path)
    assert path.stat().st_size < 300_000 and '\n {"label":"stream 7"' in path.read_text()
    assert Step.from_json(path) == step
    parts = json.loads(path.read_text())
    parts["classes"].reverse()  # as code with another order would have written it
    for stream in parts["streams"]:
        stream["kinds"] = [len(CLASSES) - 1 - kind for kind in stream["kinds"]]
    path.write_text(json.dumps(parts | {"slot_ns": 0}))  # and more than is read
    assert Step.from_json(path) == step


# ----------------------------------------------------------------------------------------- nsys on the command line
FAKE_NSYS = """#!{python}
import pathlib, shutil, subprocess, sys
with open({log!r}, "a") as log:
    print(sys.argv[1:], file=log)
output = [a.split("=", 1)[1] for a in sys.argv if a.startswith("--output=")]
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0")
elif sys.argv[1] == "profile":
    rest = sys.argv[2:]
    while rest[0].startswith("--"):
        rest.pop(0)
    code = subprocess.call(rest)
    if {reports}:
        pathlib.Path(output[0]).write_bytes(b"a report")
    sys.exit(code)
elif sys.argv[1] == "export":
    {export}
"""


@pytest.fixture
def fake_nsys(tmp_path, monkeypatch):
    """Puts an `nsys` into PATH that runs the program, and copies an export made here."""
    if os.name != "posix":
        pytest.skip("needs scripts with #!")
    training().read(tmp_path)
    [made] = tmp_path.glob("*.sqlite")

    def install(export=f"shutil.copy({str(made)!r}, output[0])", reports=True):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        log = tmp_path / "calls.txt"
        text = FAKE_NSYS.format(python=sys.executable, log=str(log), export=export, reports=reports)
        (folder / "nsys").write_text(text)
        (folder / "nsys").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        return lambda: [ast.literal_eval(line) for line in log.read_text().splitlines()]

    return install


def test_a_function_under_nsys(tmp_path, fake_nsys):
    asked = fake_nsys()
    keep = tmp_path / "kept"
    result, trace = nsys.record_nsys("json:dumps", {"obj": [1, 2]}, timeout_s=60, keep=keep)
    assert result == "[1, 2]" and len(trace.find("step")) == 2
    assert sorted(path.name for path in keep.iterdir()) == ["report.nsys-rep", "report.sqlite"]
    profile, export = asked()
    program = profile.index(sys.executable)
    assert profile[:program] == ["profile", *nsys.OPTIONS, f"--output={keep / 'report.nsys-rep'}"]
    only_the_capture = {"--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"}
    assert only_the_capture < set(nsys.OPTIONS)
    assert {"--sample=none", "--cpuctxsw=none", "--kill=none", "--force-overwrite=true"} < set(nsys.OPTIONS)
    assert "cs336_systems.store.process" in profile[program + 3]
    assert export == [
        "export", "--type=sqlite", "--force-overwrite=true",
        f"--output={keep / 'report.sqlite'}", str(keep / "report.nsys-rep"),
    ]  # fmt: skip
    assert nsys.version() == "2025.3.1.90"


def test_what_fails_under_nsys_says_why(tmp_path, fake_nsys):
    fake_nsys()
    with pytest.raises(measure_process.ChildError, match="TypeError"):
        nsys.record_nsys("json:dumps", {"object": 1}, timeout_s=60)
    (tmp_path / "report.nsys-rep").write_bytes(b"of an earlier run")
    failing = "print('starting'); print('cannot open', file=sys.stderr); sys.exit(3)"
    for made, why in (
        ({"reports": False}, r"no report .*inside nsys\.capture"),
        ({"export": failing}, r"nsys export failed with exit code 3: .*cannot open"),
        ({"export": "print('done')"}, "report.sqlite is no export"),
    ):
        fake_nsys(**made)
        with pytest.raises(nsys.NsysError, match=why):
            nsys.record_nsys("json:dumps", {"obj": 1}, timeout_s=60, keep=tmp_path)


def test_nsys_that_does_not_end_or_say(tmp_path, fake_nsys):
    fake_nsys(export="import time; time.sleep(60)")
    with pytest.raises(nsys.NsysError, match=r"nsys export took longer than 0\.3 s"):
        nsys._run([nsys.require(), "export"], 0.3)
    (tmp_path / "bin" / "nsys").write_text("#!/bin/sh\necho no version here\n")
    with pytest.raises(nsys.NsysError, match="says 'no version here'"):
        nsys.version()


def test_without_nsys(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsys.find() is None
    for call in (nsys.version, lambda: nsys.record_nsys("json:dumps", {"obj": 1}, timeout_s=1)):
        with pytest.raises(Skip, match="needs Nsight Systems"):
            call()


def test_capture_encloses_what_is_measured(monkeypatch):
    torch = pytest.importorskip("torch")
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Skip, match="needs a CUDA device"), nsys.capture():
        seen.append("never")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    with nsys.capture():
        seen.append("steps")
    assert seen == ["synchronize", "start", "steps", "synchronize", "stop"]
    seen.clear()
    with pytest.raises(RuntimeError, match="out of memory"), nsys.capture():
        raise RuntimeError("out of memory")
    assert seen == ["synchronize", "start", "stop"]


def test_span_names_both_kinds_of_ranges(monkeypatch):
    torch = pytest.importorskip("torch")
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with pytest.raises(KeyError), span("forward"):
        seen.append("inside")
        raise KeyError
    assert seen == ["forward", "inside", "pop"]


# ----------------------------------------------------------------------------------------------------- the figure
@pytest.fixture
def drawn():
    matplotlib.use("Agg")
    from cs336_systems.chapters.profiling import figure as trace_figure

    yield trace_figure
    matplotlib.pyplot.close("all")


def test_the_figure_of_thousands_of_kernels(tmp_path, drawn):
    step = condense(long_trace(), "step")
    short = condense(Trace("nsys", (), (Range("step", 0, 10, 1, 1),)), "step")
    figure = drawn.steps_figure({"A step": step, "another": short})
    above, below = figure.axes
    assert {"forward", "backward"} <= {text.get_text() for text in above.texts} and not below.texts
    assert "A step" in (above.get_title(), above.get_title(loc="left"))
    assert above.get_xlim() == below.get_xlim() == (0, step.length_ns / 1e6)
    groups = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "GEMMs" in groups and set(groups) <= set(drawn.GROUPS)
    figure.savefig(tmp_path / "f.svg")
    assert (tmp_path / "f.svg").stat().st_size < 600_000


def areas(drawn, step):
    """ms of device that each group's outlines cover in the figure: their area over the height of a busy device."""
    [axes] = drawn.steps_figure({"": step}).axes
    found = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            x, y = path.vertices.T
            area = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
            color = matplotlib.colors.to_hex(collection.get_facecolor()[0])
            found[color] = found.get(color, 0) + area / (drawn._DEVICE[1] - drawn._DEVICE[0])
    return {name: found[color.lower()] for name, (color, _) in drawn.GROUPS.items() if color.lower() in found}


def test_areas_are_time(drawn):
    step = condense(long_trace(steps=1), "step")
    for stream in step.streams:
        found = areas(drawn, dataclasses.replace(step, streams=(stream,)))
        for name, (_, classes) in drawn.GROUPS.items():
            ns = sum(length for _, length, kind in pieces_of(stream) if CLASSES[kind] in classes)
            assert found.get(name, 0) == pytest.approx(ns / 1e6, rel=2e-3), name
    # two kernels at once share the height
    streams = [condensed.Stream(name, (0,), (10**6,), (kind,)) for name, kind in (("7", 0), ("8", 3))]
    both = dataclasses.replace(step, length_ns=2 * 10**6, streams=tuple(streams))
    assert areas(drawn, both) == pytest.approx(
        {"GEMMs": 0.5, "elementwise, softmax, reductions": 0.5}, rel=2e-3
    )


def test_figures_of_odd_steps(tmp_path, drawn):
    empty = condense(Trace("nsys", (), (Range("step", 0, 0, 1, 1),)), "step")
    for figure in (drawn.steps_figure({"empty": empty}), drawn.steps_figure({})):
        assert not figure.legends
        figure.savefig(tmp_path / "f.png")


def test_every_class_is_of_one_group(drawn):
    assert sorted(name for _, classes in drawn.GROUPS.values() for name in classes) == sorted(CLASSES)
    assert len({color for color, _ in drawn.GROUPS.values()}) == len(drawn.GROUPS)


def test_a_step_opens_in_perfetto():
    ranges = (condensed.HostRange("step", 0, 0, 9_000), condensed.HostRange("forward", 1, 1_000, 4_000))
    streams = tuple(condensed.Stream("stream 7", (start,), (5_000,), (0,)) for start in (2_000, 3_000))
    step = condensed.Step("nsys", "step", 9_000, ranges, streams)  # of two devices
    events = json.loads(json.dumps(step.to_chrome()))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["host", "stream 7", "stream 7"]
    spans = [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X"]
    of_host = [("step", 0, 9, 0), ("forward", 1, 4, 0)]
    assert spans == [*of_host, (kernels.CLASSES[0], 2, 5, 1), (kernels.CLASSES[0], 3, 5, 2)]
