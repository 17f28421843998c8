"""Chapter ddp: its grid, how its groups are measured and recorded, its page."""

import dataclasses
import json

import ddp_rows
import pandas
import pytest

from cs336_systems import experiments
from cs336_systems.experiments import ddp
from cs336_systems.experiments.ddp import Case
from cs336_systems.measure import machine, nsys, rows, trace_overlap
from cs336_systems.measure.process import ChildError
from cs336_systems.measure.trace import Range, Trace
from cs336_systems.report import coverage
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages import ddp as page
from cs336_systems.report.pages import (
    ddp_bucket_words,
    ddp_figures,
    ddp_pace,
    ddp_predictions,
    ddp_ranks_words,
    ddp_words,
)

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
TINY = Case("tiny", 16, "naive", dtype="fp32")

SENTENCES = (
    ddp_predictions.time_words, ddp_predictions.optimum_words,
    ddp_pace.tokens_words, ddp_pace.host_words, ddp_pace.noise_words,
    ddp_words.naive_words, ddp_words.flat_words, ddp_words.longer_words, ddp_words.trace_words, ddp_words.best_words,
    ddp_ranks_words.scaling_words, ddp_words.memory_words, ddp_words.alone_words, ddp_words.precision_words,
    ddp_bucket_words.bucket_words, ddp_bucket_words.buffer_words, ddp_bucket_words.fit_words,
    ddp_bucket_words.floor_words,
)  # fmt: skip


def case(**changes):
    return dataclasses.replace(TINY, **changes)


@pytest.fixture
def made_up(results_root):
    """A chapter whose rows are made up, on `h200-x2`."""
    ddp_rows.write(results_root)
    return Chapter("ddp", measure="no", machine=ddp_rows.MACHINE, preset="full")


def write_all_reduces(root):
    """Rows of chapter allreduce, made up: small messages have less bandwidth; those of Gloo are not asked for."""
    header = "backend,world_size,num_bytes,how,repeat,ms_p50,bus_gb_per_s,status"
    lines = [header, "nccl,2,4096,all_reduce,0,0.025,0.1,ok", "nccl,2,67108864,all_reduce,0,0.25,268,ok"]
    lines += ["nccl,2,1073741824,all_reduce,0,3.3,320,ok", "gloo,2,1073741824,all_reduce,0,900,1,ok"]
    (root / ddp_rows.MACHINE / "allreduce.csv").write_text("\n".join(lines) + "\n")


# ------------------------------------------------------------------------------------------------ grid
@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_grid_is_a_grid(preset):
    cases = ddp.grid(preset)
    assert len(set(cases)) == len(cases)
    assert any(c.repeat for c in cases) and any(c.kind == "trace" for c in cases)
    for c in cases:
        assert c.repeat == 0 or dataclasses.replace(c, repeat=0) in cases
        assert dataclasses.replace(c, wrapper="none", bucket_mb=0.0, repeat=0, kind="time") in cases
    for group in rows.groups(ddp, cases):
        names = [(c.context_length, c.name) for c in group]
        assert len(set(names)) == len(names), "names tell the cases of a run apart"
        assert ddp.estimate_s(group) > 0


def test_full_grid_is_what_the_problems_ask_for():
    cases = ddp.grid("full")
    for wrapper in ("naive", "flat", "overlapped"):
        assert Case("xl", 128, wrapper) in cases and Case("xl", 512, wrapper) in cases
    for mb in (1, 10, 100, 1000):
        assert Case("xl", 128, "bucketed", float(mb)) in cases
    two = [c for c in cases if c.world_size <= 2]
    assert sum(ddp.estimate_s(g) for g in rows.groups(ddp, two)) < 400


# ------------------------------------------------------------------------------------------------ measuring
@without_gpu
def test_a_group_on_two_ranks():
    group = [
        case(wrapper="alone"), case(wrapper="none"), case(), case(wrapper="bucketed", bucket_mb=0.5),
        case(wrapper="bucketed", bucket_mb=0.5, repeat=1), case(wrapper="none", context_length=32),
    ]  # fmt: skip
    found = list(ddp.run_group(group))
    for c, row in zip(group, found, strict=True):
        assert set(row) <= set(ddp.METRICS) and "status" not in row
        assert row["backend"] == "gloo" and row["matmul_precision"] == "highest"
        assert row["step_ms_p20"] <= row["step_ms_p50"] <= row["step_ms_p80"]
        tokens = c.batch * c.context_length * (1 if c.wrapper == "alone" else 2)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["step_ms_p50"] * 1e3)
    assert [row["collectives"] for row in found] == [0, 0, 21, 3, 3, 0]


@without_gpu
def test_a_recorded_group(results_root):
    group = [case(kind="trace"), case(kind="trace", wrapper="bucketed", bucket_mb=0.1)]
    found = list(ddp.run_group(group))
    for c, row in zip(group, found, strict=True):
        assert set(row) <= set(ddp.METRICS) and "status" not in row
        assert row["source"] == "torch-cpu" and row["tool_version"]
        assert 0 < row["communication_ms"] < row["traced_ms"] and 0 < row["compute_ms"] < row["traced_ms"]
        assert 0 <= row["backward_overlap_ms"] <= row["overlap_ms"] <= row["communication_ms"]
        steps = trace_overlap.from_json(ddp.overlap_path(c, machine.machine_name(), results_root))
        assert len(steps) == 2 and [name for name, *_ in steps[0].phases][:2] == ["forward", "backward"]
    assert found[0]["messages"] == 22 and found[0]["backward_overlap_ms"] == 0
    assert found[1]["messages"] == 8  # seven buckets, and which gradients there are


@without_gpu
def test_what_a_machine_cannot_run_says_what_it_needs(monkeypatch):
    [row] = ddp.run_group([case(dtype="tf32")])
    assert row["status"].startswith("skipped: needs a CUDA device")
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 8 * 2**30)
    large = list(ddp.run_group([case(size="xl"), case(size="xl", wrapper="none")]))
    assert len(large) == 2 and all("8.0 GiB are free" in row["status"] for row in large)
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])
    assert [r["status"] for r in ddp.run_group([case()])] == ["skipped: needs 2 GPUs; there is 1"]


@without_gpu
def test_memory_that_runs_out_together_sends_each_alone(monkeypatch):
    calls = []

    def launched(cases):
        calls.append(len(cases))
        if len(cases) > 1 or cases[0].wrapper == "flat":
            raise RuntimeError("rank 0 of 2: OutOfMemoryError: CUDA out of memory")
        return [{"step_ms_p50": 1.0}]

    monkeypatch.setattr(ddp, "_launched", launched)
    found = list(ddp.run_group([case(), case(wrapper="flat")]))
    assert calls == [2, 1, 1] and found == [{"step_ms_p50": 1.0}, {"status": "oom"}]


@without_gpu
def test_a_rank_that_fails_is_an_error_in_all_rows(monkeypatch, capfd):
    found = list(ddp.run_group([case(wrapper="unknown"), case()]))
    assert all(row["status"].startswith("error: LaunchError: rank") for row in found)
    assert "unknown wrapper 'unknown'" in capfd.readouterr().err


@without_gpu
def test_nsight_systems_records_all_ranks_in_one_report(monkeypatch, results_root):
    """What is asked of it, and how its trace is read; the recording itself needs GPUs."""
    group = [case(kind="trace"), case(kind="trace", wrapper="torch")]
    asked = {}

    seen = ["rank 0", "rank 1"]

    def record_nsys(function, arguments, timeout_s, keep):
        asked.update(function=function, arguments=json.loads(json.dumps(arguments)))
        return None, Trace("nsys", (), tuple(Range(name, 0, 1, n, n) for n, name in enumerate(seen)))

    def overlap(trace, name, phases):
        asked.setdefault("ranges", []).append(name)
        return [ddp_rows.traced(Case("xl", 512, "naive", kind="trace"))]

    monkeypatch.setattr(ddp.nsys, "record_nsys", record_nsys)
    monkeypatch.setattr(ddp.nsys, "find", lambda: "/usr/bin/nsys")
    monkeypatch.setattr(ddp.nsys, "version", lambda: "2025.3")
    monkeypatch.setattr(ddp.trace_overlap, "overlap", overlap)
    monkeypatch.setattr(ddp.machine, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    found = list(ddp.run_group(group))
    assert all(row["source"] == "nsys" and row["tool_version"] == "2025.3" for row in found)
    assert asked["function"] == "cs336_systems.experiments.ddp:under_nsys"
    assert [Case(**c) for c in asked["arguments"]["cases"]] == group
    assert asked["ranges"] == [f"rank {r}/{name}/step" for name in ("naive", "torch") for r in (0, 1)]

    seen.remove("rank 1")  # then each rank is recorded by torch's profiler
    step = dataclasses.asdict(ddp_rows.traced(Case("xl", 512, "naive", kind="trace"))) | {"source": "torch"}
    monkeypatch.setattr(ddp, "_launch", lambda function, cases, keep: [[[step]] * 2] * 2)
    assert [row["source"] for row in ddp.run_group(group)] == ["torch"] * 2

    # as where it is installed, and cannot write a report
    for error in (nsys.NsysError("there is no report"), ChildError("longer than 9 s"), ValueError("damaged")):

        def fails(*arguments, error=error, **options):
            raise error

        monkeypatch.setattr(ddp.nsys, "record_nsys", fails)
        assert [row["source"] for row in ddp.run_group(group)] == ["torch"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus(results_root):
    ways = (
        ("alone", 0.0),
        ("none", 0.0),
        ("naive", 0.0),
        ("bucketed", 1.0),
        ("in_place", 1.0),
        ("torch", 0.0),
    )
    group = [case(wrapper=w, bucket_mb=mb, dtype="tf32") for w, mb in ways]
    for row in ddp.run_group(group):
        assert "status" not in row and row["backend"] == "nccl" and row["peak_gib"] > 0
    traced = [dataclasses.replace(c, kind="trace") for c in group[2:]]
    for c, row in zip(traced, ddp.run_group(traced), strict=True):
        assert "status" not in row and row["communication_ms"] > 0
        assert len(trace_overlap.from_json(ddp.overlap_path(c, machine.machine_name(), results_root))) == 2


# ------------------------------------------------------------------------------------------------ page
def test_page_of_made_up_rows(made_up):
    table = page.step_table(made_up, ("none", "naive"))
    assert list(table["way"]) == ["no communication", "naive"] * 3
    assert list(table["context"]) == [128, 128, 512, 512, 1024, 1024]
    assert table.iloc[1]["calls"] == "435"
    assert float(table.iloc[1]["exposed"]) == pytest.approx(39.7, rel=0.02)
    assert table.iloc[0]["share"] == "–" and table.iloc[1]["share"].endswith(" %")
    assert "435 all-reduces" in ddp_words.naive_words(made_up)
    assert "neither the precision" in ddp_words.naive_words(made_up)
    assert "from the data sheet" in ddp_predictions.time_words(made_up)
    assert "buckets of 250 MB" in ddp_bucket_words.bucket_words(made_up)
    assert ddp_bucket_words.fit_words(made_up).count("the best bucket of the sweep has 250 MB") == 3
    fits = page.fit_table(made_up)
    assert list(fits["fit"]) == ["model", "with constant"] * 3 and set(fits["constant"][::2]) == {"–"}
    assert "× *torch DDP*" in ddp_words.best_words(made_up)
    assert "0.30 % to 0.30 %" in ddp_words.memory_words(made_up)
    assert "the others less than 0.5 %" in ddp_words.memory_words(made_up)
    assert "*bucketed, 100 MB*" in ddp_words.alone_words(made_up)
    assert "needs 8 GPUs; there are 2" in ddp_words.skipped_words(made_up)
    assert ddp_ranks_words.scaling_words(made_up).count("*naive*") == 3
    assert "3 cases were measured twice" in ddp_pace.noise_words(made_up)
    assert "Nsight Systems" in ddp_words.trace_words(made_up)
    assert "context 512" in ddp_pace.host_words(made_up)
    assert "*naive*" in ddp_words.against_words(made_up, "flat", ("naive",))
    assert "than *naive*" in ddp_words.flat_words(made_up)
    assert "*overlapped* exposes" in ddp_words.longer_words(made_up)
    summary = page.summary_table(made_up).set_index(["context", "way"])
    assert summary.loc[(512, "torch DDP"), "over torch"] == "1.000 ×"
    assert summary.loc[(512, "one rank alone"), "over none"] == "–"
    others = page.other_table(made_up)
    assert set(others["dtype"]) == {"fp32", "bf16", "tf32"} and set(others["ranks"]) == {1, 2}
    assert "over torch" in others and "scaling" not in others
    traces = page.trace_table(made_up)
    assert len(traces) == 5 and len(page.bucket_table(made_up)) == 18
    assert list(traces["all ranks"]) == list(traces["communicating"]), (
        "ranks do the same, and wait for nobody"
    )
    assert len(page.prediction_table(made_up)) == 12
    for figure in (ddp_figures.phase_figure, ddp_figures.bucket_figure):
        assert len(figure(made_up, ddp_rows.MACHINE).axes) == 3
    for after in (True, False):
        figure = ddp_figures.overlap_figure(made_up, ddp_rows.MACHINE, after)
        assert [ax.get_title() or ax.get_title(loc="left") for ax in figure.axes] == (
            ["naive", "flat"] if after else ["overlapped", "bucketed, 100 MB"]
        )


def test_two_machines_of_one_kind(made_up, results_root):
    """What one of them has measured is no gap of the other's; their numbers of ranks stand side by side."""
    many = [c for c in ddp.grid("full") if c.world_size == 4]
    ddp_rows.write(results_root, many, "h200-x4", gpus=4)
    both = Chapter("ddp", measure="no", machine="h200-x2,h200-x4", preset="full")
    rows = both.rows()
    assert len(rows) == len(ddp.grid("full")) and set(rows[rows["world_size"] == 4]["machine"]) == {"h200-x4"}
    assert set(rows[rows["machine"] == "h200-x2"]["status"]) == {"ok", "skipped: needs 8 GPUs; there are 2"}
    assert page.teams(both) == [("h200-x2", 2), ("h200-x4", 4)] and page.teams(made_up) == [("h200-x2", 2)]
    said = ddp_predictions.time_words(both)
    assert "On 4 ranks of `h200-x4`" in said and said.count("*Flat*") == 1, "flat is not timed on four ranks"
    assert "7.99 GB on 2 ranks and 12.0 GB on 4 ranks" in ddp_predictions.size_words(both)
    assert "h200-x4" not in ddp_bucket_words.buffer_words(both)
    said = ddp_pace.noise_words(both)
    assert "Steps of 2 ranks are even" in said and "Steps of 4 ranks (`h200-x4`) are even" in said
    assert said.endswith("No case was measured twice there.")
    assert ("in_place", 100.0) in page.side_by_side(both, 512)
    assert not {("in_place", 250.0), ("flat", 0.0)} & set(page.side_by_side(both, 512))
    said = ddp_ranks_words.more_ranks_words(both)
    assert said.count("on 2 ranks of `h200-x2`") == said.count("ms that *naive* exposes, *") == 3
    assert "gets longer" not in said, "in these rows the backward pass is always the same"
    assert said.count("`h200-x4`, context") == 3 and "1.50 times the bytes through each link" in said
    assert ddp_ranks_words.more_ranks_words(made_up) == ""
    assert ddp_ranks_words.scaling_words(both).count("4 ranks") == 3
    for ax in ddp_figures.scaling_figure(both).axes:
        assert [label.get_text() for label in ax.get_xticklabels()] == ["2 ranks", "4 ranks"]
        assert {len(line.get_xdata()) for line in ax.lines[:5]} == {2}

    # what the backward pass of two ranks takes longer; of four, 1.5 times
    late = {"in_place": 10, "bucketed": 20}
    for name in ("h200-x2", "h200-x4"):
        path = results_root / name / "ddp.csv"
        frame = pandas.read_csv(path, dtype={"env": str, "code": str})
        more = frame["wrapper"].map(late).fillna(0) * (1.5 if name == "h200-x4" else 1)
        frame["backward_ms_p50"] += more
        frame["step_ms_p50"] += more
        if name == "h200-x4":
            for q, factor in (("p20", 0.8), ("p80", 1.2)):
                frame.loc[frame["context_length"] == 128, f"step_ms_{q}"] *= factor
        frame.to_csv(path, index=False)
    both = Chapter("ddp", measure="no", machine="h200-x2,h200-x4", preset="full")
    said = ddp_ranks_words.more_ranks_words(both)
    assert said.count("`h200-x4`, context") == 2 and said.count("The backward pass gets longer by") == 2
    assert "with *bucketed, 100 MB* and" in said and "torch DDP" not in said
    said = ddp_ranks_words.scaling_words(both)
    assert said.count("4 ranks") == 2 and "shares are rough there" in said
    assert "Steps of 4 ranks (`h200-x4`) are even at" in ddp_pace.noise_words(both)
    ax = ddp_figures.scaling_figure(both).axes[0]
    assert (ax.get_title() or ax.get_title(loc="left")) == "context 128 (uneven)"


def test_the_fit_recovers_what_the_rows_were_made_of(made_up):
    found = page.sweep(made_up, ddp_rows.MACHINE, 512)
    fit = page.fit(made_up, found, constant=True)
    assert fit.model.bytes_per_s == pytest.approx(ddp_rows.RATE, rel=0.1)
    assert fit.call_s == pytest.approx(ddp_rows.CALL_MS / 1e3, rel=0.1)


def test_all_reduces_that_were_measured_are_preferred(made_up, results_root):
    sheet = ddp_predictions.messages_ms(made_up, ddp_rows.MACHINE, 2, [2**30])
    assert sheet == pytest.approx(2**30 / 450e9 * 1e3)
    assert ddp_predictions.optimum(made_up, ddp_rows.MACHINE, 2) is None, (
        "the data sheet has no time of a call"
    )
    write_all_reduces(results_root)
    assert ddp_predictions.bandwidth(made_up, ddp_rows.MACHINE, 2)[:2] == pytest.approx((320e9, 25e-6))
    said = ddp_predictions.time_words(made_up)
    assert "at 320 GB/s" in said and "allreduce.ipynb" in said and "*Flat*" in said
    assert "from the data sheet" in ddp_predictions.bandwidth(made_up, ddp_rows.MACHINE, 4)[2]

    def ms(*sizes):
        return ddp_predictions.messages_ms(made_up, ddp_rows.MACHINE, 2, sizes)

    assert ms(2**26) == pytest.approx(0.25) and ms(2**31) == pytest.approx(6.6) and ms(100) == 0.025
    assert 0.25 < ms(2**28) < 3.3 and ms(2**26, 2**26) == pytest.approx(0.5)
    model = ddp_predictions.optimum(made_up, ddp_rows.MACHINE, 2)
    assert (model.bytes_per_s, model.call_s) == pytest.approx((320e9, 25e-6))
    after = {
        w: ddp_predictions.after_ms(made_up, ddp_rows.MACHINE, 2, w, mb)
        for w, mb in (
            ("naive", 0.0),
            ("flat", 0.0),
            ("overlapped", 0.0),
            ("bucketed", 1000.0),
            ("torch", 0.0),
        )
    }
    assert (
        after["torch"] is None
        and after["naive"] > after["flat"] > after["bucketed"] > after["overlapped"] > 0
    )


def uneven(results_root, contexts, change):
    """The chapter with the steps of some contexts changed: `change` is given a row as a dict."""
    path = results_root / ddp_rows.MACHINE / "ddp.csv"
    frame = pandas.read_csv(path, dtype={"env": str, "code": str})
    for i, row in frame.iterrows():
        if row["kind"] == "time" and row["context_length"] in contexts and row["dtype"] == "tf32":
            for column, value in change(row.to_dict()).items():
                frame.loc[i, column] = value
    frame.to_csv(path, index=False)
    return Chapter("ddp", measure="no", machine=ddp_rows.MACHINE, preset="full")


def test_conclusions_are_drawn_where_steps_are_even(made_up, results_root):
    assert all(place.even for place in ddp_pace.places(made_up))
    assert set(ddp_pace.pace_table(made_up)["steps"]) == {"even"}
    assert "uneven" not in "".join(sentence(made_up) for sentence in SENTENCES)

    def wide(row):  # the host's moods, in which naive fares worst
        late = 30 if row["wrapper"] == "naive" else 0
        times = {"step_ms_p20": 0.7, "step_ms_p50": 1.0, "step_ms_p80": 1.3}
        return {c: row[c] * f + late for c, f in times.items()} | {
            "forward_ms_p50": row["forward_ms_p50"] + late
        }

    chapter = uneven(results_root, (128, 512), wide)
    found = ddp_pace.places(chapter)
    assert [place.even for place in found] == [True, True, True, False, False]
    assert [p.name for p in ddp_pace.leading(chapter)] == [
        "context 1024 in TF32", "context 512 in fp32", "context 512 in bf16"
    ]  # fmt: skip
    table = ddp_pace.pace_table(chapter).set_index(["ranks", "dtype", "context"])
    assert (
        table.loc[(2, "tf32", 1024), "steps"] == "even" and table.loc[(2, "tf32", 128), "steps"] == "uneven"
    )
    assert float(table.loc[(2, "tf32", 128), "same work"].split()[0]) > 20
    said = ddp_pace.noise_words(chapter)
    assert "even at context 1024 in TF32" in said and "uneven at context 128 in TF32" in said
    said = ddp_words.naive_words(chapter)
    assert said.count("**") == 6 and said.count("waiting for the slower rank") == 2
    assert "So these steps do not compare the two" in ddp_words.flat_words(chapter)
    assert "p20–p80 ranges meet" in ddp_words.against_words(chapter, "flat", ("naive",))
    assert "*torch DDP* among them" in ddp_words.best_words(chapter)
    assert ddp_bucket_words.fit_words(chapter).count("context") == 1
    assert set(ddp_pace.exposed_table(chapter)["context"]) == {512, 1024}

    chapter = uneven(results_root, (1024,), wide)  # bf16 and fp32 are left
    assert {place.dtype for place in ddp_pace.leading(chapter)} == {"fp32", "bf16"}


def test_what_is_exposed_is_taken_apart(made_up, results_root):
    write_all_reduces(results_root)

    def longer(row):  # as where the GPU is shared, and buffers cost the host
        more = {"in_place": 10, "overlapped": 30, "bucketed": 10 + 0.3 * row["collectives"]}.get(
            row["wrapper"], 0
        )
        columns = ("backward_ms_p50", "step_ms_p20", "step_ms_p50", "step_ms_p80")
        return {c: row[c] + more for c in columns}

    chapter = uneven(results_root, (1024,), longer)
    table = ddp_pace.exposed_table(chapter).query("context == 1024").set_index("way")
    assert float(table.loc["in place, 100 MB", "longer"]) == pytest.approx(10, abs=2.5)
    assert table.loc["naive", "of naive's"] == "100 %" and table.loc["torch DDP", "wait"] == "–"
    assert "takes from the backward pass" in ddp_words.longer_words(chapter)
    said = ddp_bucket_words.buffer_words(chapter)
    assert "sends the same 435 messages as *overlapped*" in said and "more," in said
    said = ddp_bucket_words.fit_words(chapter)
    assert "What the model lacks" in said and "Nor is the fitted $o$ the price of a call" in said
    assert "times as long as sending it" in said


def test_time_together_is_that_of_all_ranks():
    one = ddp_rows.traced(Case("xl", 512, "naive", kind="trace"))
    spans = (((0, 4_000_000), (10_000_000, 5_000_000)), ((2_000_000, 10_000_000), (20_000_000, 1_000_000)))
    ranks = [dataclasses.replace(one, communication=communication) for communication in spans]
    assert page.together_ms(ranks) == 4.0 and page.together_ms(ranks[:1]) is None


def test_ratios_stay_within_a_run(results_root):
    ddp_rows.write(results_root, [c for c in ddp.grid("full") if c.wrapper != "none"])
    chapter = Chapter("ddp", measure="no", machine=ddp_rows.MACHINE, preset="full")
    assert page.sweep(chapter, ddp_rows.MACHINE, 512) == []
    assert set(page.step_table(chapter, ("naive",))["exposed"]) == {"–"}


def test_page_without_rows():
    chapter = Chapter("ddp", measure="no", preset="full")
    for sentence in SENTENCES:
        assert "not measured" in sentence(chapter)
    assert "not measured" in ddp_words.against_words(chapter, "flat", ("naive",))
    assert ddp_words.skipped_words(chapter) == ""
    assert "435 tensors" in ddp_predictions.size_words(chapter)
    for table, column in (
        (page.step_table, "step"),
        (page.summary_table, "step, ms"),
        (page.trace_table, "step"),
    ):
        assert set(table(chapter)[column]) == {"–"}
    assert page.fit_table(chapter).empty and ddp_pace.pace_table(chapter).empty
    assert (
        ddp_pace.exposed_table(chapter).empty
        and page.bucket_table(chapter).empty
        and len(page.prediction_table(chapter)) == 12
    )
    assert ddp_figures.phase_figure(chapter, "").axes and ddp_figures.bucket_figure(chapter, "").axes
    assert ddp_figures.overlap_figure(chapter, "", True).axes


def test_published_numbers_have_their_source(project_root, monkeypatch):
    monkeypatch.setenv("CS336_RESULTS", str(project_root / "results"))
    said = ddp_words.published_words(Chapter("ddp", measure="no", preset="full"))
    assert "85.9 %" in said and said.count("https://") == len(said.splitlines())


def test_all_problems_of_data_parallelism_are_covered(project_root):
    found = [p for p in coverage.PROBLEMS if p.chapter == "ddp"]
    assert len(found) == 7
    for problem in found:
        assert (project_root / "cs336_systems" / problem.code).is_file()
        assert (project_root / "tests" / problem.tests).is_file()
