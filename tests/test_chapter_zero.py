"""Chapter zero: its grid, what is measured on several processes against the closed forms, and its page."""

from __future__ import annotations

import dataclasses
import json

import pytest
import zero_rows

from cs336_systems import experiments
from cs336_systems.accounting.zero import STEP_MOMENTS, tensor_sizes
from cs336_systems.experiments import zero
from cs336_systems.experiments.zero import Case
from cs336_systems.measure import rows
from cs336_systems.measure.machine import machine_name
from cs336_systems.parallel.launch import LaunchError
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages import zero as page
from cs336_systems.report.pages import zero_kernel_words as kernel_words
from cs336_systems.report.pages import zero_speed as speed
from cs336_systems.report.pages import zero_speed_words as times
from cs336_systems.report.pages import zero_words as words
from cs336_systems.sizes import size

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

MACHINE = "h200-x2"
TINY = {"size": "tiny", "bucket_mb": 0.25}


# --------------------------------------------------------------------------------------------- grids
@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_grid_is_a_grid(preset):
    cases = zero.grid(preset)
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert case.variant in zero.VARIANTS and case.moment in zero.MOMENTS
        assert case.repeat == 0 or dataclasses.replace(case, repeat=0) in cases
    for group in rows.groups(zero, cases):
        assert zero.estimate_s(group) > 0
        # what has a launch to itself has it for one variant; what takes turns is timed
        assert len({c.variant for c in group}) == 1 or {c.moment for c in group} == {zero.TIMED}
        assert len({zero.key_of(c) for c in group}) == len(group)


def test_full_has_every_variant_and_fits_the_time():
    cases = zero.grid("full")
    for context in (128, 512):
        for moment in STEP_MOMENTS:
            assert Case("alone", context, moment, world_size=1) in cases
            for variant in ("plain", "sharded", "torch", "torch_zero"):
                assert Case(variant, context, moment) in cases
    for variant in zero.VARIANTS:
        for context in (128, 512, 1024):
            assert Case(variant, context, zero.TIMED) in cases
    assert {c.world_size for c in cases} == {1, 2, 4, 8} and {c.size for c in cases} == {"xl"}
    two = [c for c in cases if c.world_size <= 2]
    assert sum(map(zero.estimate_s, rows.groups(zero, two))) < 330


def test_wrong_choices_are_named():
    for field, wrong, allowed in (
        ("variant", "fsdp", "alone, plain, sharded, overlapped, torch, torch_zero"),
        ("moment", "late", "initialized, first_before"),
        ("size", "huge", "tiny, small"),
    ):
        with pytest.raises(ValueError, match=rf"'{wrong}'; allowed: {allowed}"):
            zero.refuse(dataclasses.replace(Case("plain", 64, "initialized", **TINY), **{field: wrong}))


# --------------------------------------------------------------------------------------------- measured
@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The rows of the smoke preset, measured once; and their root."""
    root = tmp_path_factory.mktemp("results")
    rows.measure(zero, zero.grid("smoke"), root=root)
    return rows.read(zero, machine_name(), root).to_dict("records"), root


def case_of(row):
    return Case(**{f: type(default)(row[f]) for f, default in dataclasses.asdict(Case("", 0, "")).items()})


@pytest.mark.slow
def test_smoke_agrees_with_the_closed_forms(smoke):
    found, _ = smoke
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    assert {row["status"] for row in found} == {"ok"} and len(found) == len(zero.grid("smoke"))
    peaks = {}
    for row in found:
        if row["moment"] == zero.TIMED:
            continue
        case = case_of(row)
        expected = zero.predicted(case, device)
        for part, num_bytes in expected.items():
            # what the graph has saved contains the ids, which are there already
            assert row[f"{part}_bytes"] == pytest.approx(num_bytes, rel=1e-3, abs=100), (case, part)
        assert sum(row[column] for column in zero.COMPONENT_COLUMNS.values()) == row["live_bytes"]
        if device == "cpu":
            assert row["live_bytes"] == pytest.approx(sum(expected.values()), rel=0.02)
            peak = sum(zero.predicted_peak(case, device).values())
            peaks.setdefault(case.variant, [peak]).append(row["peak_bytes"])
    for peak, *measured in peaks.values():
        assert max(measured) == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
def test_smoke_counts_what_is_sent(smoke):
    found, _ = smoke
    counted = {r["variant"]: r for r in found if r["moment"] == zero.TIMED and r["repeat"] == 0}
    sizes = tensor_sizes(size("tiny"))
    whole = 4 * sum(sizes)
    assert set(counted) == set(zero.VARIANTS)
    assert counted["overlapped"]["broadcast_calls"] != counted["overlapped"]["broadcast_calls"]  # empty
    assert counted["alone"]["all_reduce_calls"] == counted["alone"]["broadcast_calls"] == 0
    for variant in ("sharded", "torch_zero"):
        assert counted[variant]["broadcast_calls"] == len(sizes)
        assert counted[variant]["broadcast_bytes"] == whole
    for variant in ("plain", "sharded"):  # a byte a parameter tells which gradients there are
        assert counted[variant]["all_reduce_bytes"] == whole + len(sizes)
    for variant in ("torch", "torch_zero"):
        assert counted[variant]["all_reduce_bytes"] == whole
    assert {counted[variant]["other_calls"] for variant in counted if variant != "overlapped"} == {0}
    for row in found:
        if row["moment"] == zero.TIMED:
            assert row["step_ms_p20"] <= row["step_ms_p50"] <= row["step_ms_p80"]
            assert row["tokens_per_s"] == pytest.approx(2 * 2 * 64 / row["step_ms_p50"] * 1e3, rel=1e-3)
    assert len({r["run"] for r in found if r["moment"] == zero.TIMED}) == 1


@pytest.mark.slow
def test_page_of_measured_rows(smoke):
    _, root = smoke
    chapter = Chapter("zero", measure="no", machine="this", preset="smoke", root=root)
    assert page.unit(chapter)[0] == "MiB"
    assert "saved" in words.saved(chapter) and "4Ψ bytes" in words.counted(chapter)
    assert len(speed.traffic_table(chapter)) == 4


@without_gpu
@pytest.mark.slow
def test_torchs_container_keeps_buckets_and_one_rank_has_none():
    """The variants that the smoke preset leaves out."""
    for variant, world_size in (("torch_zero", 2), ("alone", 1)):
        cases = [Case(variant, 64, moment, world_size=world_size, **TINY) for moment in STEP_MOMENTS]
        for case, row in zip(cases, zero.run_group(cases), strict=True):
            assert "status" not in row, row
            for part, num_bytes in zero.predicted(case, "cpu").items():
                assert row[f"{part}_bytes"] == pytest.approx(num_bytes, rel=1e-3, abs=100), (case, part)


@without_gpu
def test_a_machine_without_gpus_says_what_is_missing():
    found = list(
        zero.run_group([Case("alone", 128, m, world_size=1) for m in ("initialized", "later_after")])
    )
    assert found == 2 * [{"status": "skipped: needs 1 GPU"}]
    found = list(zero.run_group([Case(v, c, zero.TIMED) for v in ("plain", "sharded") for c in (128, 512)]))
    assert found == 4 * [{"status": "skipped: needs 2 GPUs"}]


# --------------------------------------------------------------------------------------------- launches, made up
def made_up_launch(monkeypatch, fail):
    """`launch` gives each case its own key and number of ranks, unless `fail(contexts)` raises."""
    calls = []

    def launch(function, world_size, arguments, **options):
        cases = [Case(**case) for case in json.loads(json.dumps(arguments))["cases"]]
        calls.append((function, world_size, sorted({case.context_length for case in cases})))
        fail(calls[-1][2])
        live = {zero.key_of(case): {"live_bytes": case.context_length} for case in cases}
        return [
            {k: {"live_bytes": m["live_bytes"] + rank} for k, m in live.items()} for rank in range(world_size)
        ]

    monkeypatch.setattr(zero, "launch", launch)
    monkeypatch.setattr(zero, "refuse", lambda case: None)
    return calls


def test_one_launch_for_all_contexts_of_a_variant(monkeypatch):
    calls = made_up_launch(monkeypatch, lambda contexts: None)
    cases = [Case("plain", c, m) for c in (128, 512) for m in STEP_MOMENTS]
    found = list(zero.run_group(cases))
    assert calls == [("cs336_systems.experiments.zero_ranks:memory_on_a_rank", 2, [128, 512])]
    # the rank that holds most, and how far the other is from it
    assert [row["live_bytes"] for row in found] == [case.context_length + 1 for case in cases]
    assert {row["rank_spread_bytes"] for row in found} == {1}


def test_a_context_that_does_not_fit_does_not_take_the_others_with_it(monkeypatch, capsys):
    def fail(contexts):
        if 512 in contexts:
            raise LaunchError("rank 1 of 2: OutOfMemoryError: CUDA out of memory. Tried to allocate", 1)

    calls = made_up_launch(monkeypatch, fail)
    cases = [Case(v, c, zero.TIMED) for v in ("plain", "sharded") for c in (128, 512)]
    found = list(zero.run_group(cases))
    assert [contexts for _, _, contexts in calls] == [[128, 512], [128], [512]]
    assert [row.get("status") for row in found] == [None, "oom", None, "oom"]


def test_an_error_is_a_row_with_its_first_line(monkeypatch, capsys):
    def fail(contexts):
        raise LaunchError("rank 0 of 2: ValueError: no such thing\nTraceback ...", 0)

    made_up_launch(monkeypatch, fail)
    [found] = zero.run_group([Case("plain", 128, "initialized")])
    assert found["status"] == "error: LaunchError: rank 0 of 2: ValueError: no such thing"
    assert "Traceback" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- page
@pytest.fixture
def made_up(results_root):
    """A chapter whose rows are made up, on two H200."""
    zero_rows.write(zero.grid("full"), results_root)
    environment = {"gpu": "NVIDIA H200", "gpus": 2}
    (results_root / MACHINE / "machine.json").write_text(json.dumps({"00000000": environment}))
    return Chapter("zero", measure="no", machine=MACHINE, preset="full")


def test_tables_of_made_up_rows(made_up):
    moments = page.moments_table(made_up, 128)
    assert len(moments) == 15 and set(moments["apart"]) == {"1.0 %"}
    assert list(moments["variant"][:3]) == 3 * ["one rank"] and list(moments["ranks"][:4]) == [
        1,
        1,
        1,
        2,
    ]
    after = moments[moments["moment"] == "after it"].set_index("variant")["closed form"]
    assert after["plain"] == "29.8" and after["sharded"] == "22.3"
    assert after["torch"] == "37.2"
    components = page.components_table(made_up, 128).set_index("variant")
    assert components.loc["sharded", "optimizer state"] == "7.44 / 7.44"
    assert components.loc["sharded", "buckets"] == "–"
    assert components.loc["torch", "buckets"] == "7.44 / 7.44"
    peaks = page.peak_table(made_up)
    assert len(peaks) == 10 and set(peaks["apart"]) == {"1.0 %"} and set(peaks["in phase"]) == {"backward"}
    assert len(page.difference_table(made_up)) == 5
    steps = speed.times_table(made_up)
    assert len(steps) == 18 and list(steps["over torch's sharded"][:6]) == [
        "0.798 ×", "0.851 ×", "0.904 ×", "0.830 ×", "0.915 ×", "1.00 ×",
    ]  # fmt: skip
    assert steps["step"][0] == "150 (149 – 152)" and steps["variant"][0] == "no communication"
    kernels = speed.optimizer_table(made_up).set_index("variant")
    # 28 and 4 bytes of 1,998,235,200 parameters, at 4.8 TB/s and 450 GB/s
    assert kernels.loc["plain", "least updating"] == "11.7"
    assert kernels.loc["sharded", "least sending"] == "8.88"
    assert kernels.loc["sharded", "phase, not recorded"] == "22.0"
    traffic = speed.traffic_table(made_up).set_index("variant")
    assert traffic.loc["sharded", "sent, formula"] == "11.2"
    assert traffic.loc["plain", "sent, counted"] == "7.44"


def test_the_phase_of_the_optimizer_in_parts(made_up):
    phases = speed.phases_table(made_up).set_index("variant")
    assert list(phases.index) == ["plain", "sharded", "overlapped", "torch", "torch, sharded"]
    assert list(phases["measured"]) == ["14.0", "22.0", "7.00", "14.0", "32.0"]
    assert list(phases["closed form, least"]) == ["11.7", "10.3", "5.83", "11.7", "14.7"]
    # an update of 14 ms, broadcasts of 18: 14; 7/4 and 18; 7; 14; one after the other
    assert list(phases["closed form, rates of the kernels"]) == ["14.0", "19.8", "7.00", "14.0", "25.0"]
    assert phases.loc["torch, sharded", "rest"] == "7.00"


def test_sentences_of_made_up_rows(made_up):
    assert "7.44 GiB)" in words.saved(made_up) and "25.0 % less" in words.saved(made_up)
    assert "after it 30.1 GiB and 22.6 GiB" in words.first_step(made_up)
    assert "nowhere above that" in words.first_step(made_up)
    accuracy = words.accuracy(made_up)
    assert "parameters, gradients, optimizer state, buckets and activations are exactly" in accuracy
    assert "at most 0.50 % from it, and what is alive 1.0 %" in accuracy
    assert "Peaks are at most 1.0 % apart" in accuracy
    assert "differ by 12.5 KiB" in words.spread(made_up) and "rounding" not in words.spread(made_up)
    assert "frees 8.93 GiB of the device, and 7.52 GiB of what is alive." in words.on_device(made_up)
    assert words.crossover(made_up).count("the last bucket has 61.0 MiB") == 1
    assert "at context 512 at its beginning" in words.crossover(made_up)
    assert words.rounding(made_up) == ""
    assert "686 GB/s, so without overlap the optimizer's step is longer" in words.break_even_words(made_up)
    assert words.counted(made_up).count("and 435 more of gradients") == 3
    assert "counter 1.515 · 4Ψ" in words.counted(made_up)  # the made-up counter sees 1 % more
    assert (
        words.skipped(made_up)
        == "60 of these were left out on `h200-x2`: what needs 4 GPUs, what needs 8 GPUs."
    )
    assert "allocator" in words.source(made_up)


def test_sentences_about_times_of_made_up_rows(made_up):
    assert "on 2 ranks of `h200-x2` by 1.0, 1.0 and 1.0 % at contexts 128, 512 and 1024." in times.noise(
        made_up
    )
    assert "+10.0 ms, 1.06 ×)" in times.cost(made_up) and "156 ms (−4.00 ms" in times.cost(made_up)
    assert "71 % of it lies beside broadcasts (all rounds but the first: 75 %)" in kernel_words.kernels(
        made_up
    )
    assert "0.500 of that" in kernel_words.kernels(made_up)
    assert kernel_words.recorded(made_up) == ""
    assert "sharding in 4 rounds shortens the phase; in fact it lengthens it" in kernel_words.parts(made_up)
    assert "leaves 0.0 to 7.0 ms" in kernel_words.parts(made_up)
    assert "optimizer −15.0 ms" in times.hidden(made_up)
    peer = times.peer(made_up)
    assert "no higher, is met in time (context 1024) and in memory (contexts 128 and 512)." in peer
    assert peer.count("over one of torch's is 0.904 ×, measured again 0.913 ×, overlapped 0.830 ×") == 3
    assert peer.count("0.750 × (7.44 GiB are copies") == 1
    assert "0.930 × at context 128" in times.containers(made_up)
    assert "adds 6.25 ms" in times.averaging(made_up) and "sharding +8.00 ms" in times.averaging(made_up)


def chapter_of_steps(root, monkeypatch, scale=None, **step_ms):
    """A chapter whose steps take these ms; at the contexts of `scale` that many times as long as at 128."""
    for variant, ms in step_ms.items():
        monkeypatch.setitem(zero_rows.STEP_MS, variant, ms)
    of_a_case = zero_rows.times

    def stretched(case):
        found, factor = of_a_case(case), (scale or {}).get(case.context_length, 1.0)
        return {k: v * factor if k.startswith("step_ms") else v for k, v in found.items()}

    monkeypatch.setattr(zero_rows, "times", stretched)
    zero_rows.write(zero.grid("full"), root)
    return Chapter("zero", measure="no", machine=MACHINE, preset="full")


def test_more_ranks_on_another_machine(made_up, results_root):
    assert times.more_ranks(made_up) == ""
    zero_rows.write([c for c in zero.grid("full") if c.world_size == 4], results_root, "h200-x4", gpus=4)
    about = json.dumps({"00000000": {"gpu": "NVIDIA H200", "gpus": 4}})
    (results_root / "h200-x4" / "machine.json").write_text(about)
    both = Chapter("zero", measure="no", machine=f"{MACHINE},h200-x4", preset="full")
    [said] = times.more_ranks(both).splitlines()
    assert said.startswith(
        "- `h200-x4`, 4 ranks: after a step sharding has saved 11.3 GiB (closed form: 11.2 GiB)"
    )
    assert (
        "takes 200 ms without and 212 ms with sharding (+12.5 ms, 1.06 ×), 0.904 × that of *torch, shar"
        in said
    )
    assert "optimizer −15.0 ms" in said and "the step by −17.5 ms, 0.918 ×." in said
    assert speed.teams(both) == [(MACHINE, 2), ("h200-x4", 4)]
    assert ", on 4 ranks of `h200-x4` by 1.0, 1.0 and 1.0 %" in times.noise(both)
    phases = speed.phases_table(both).set_index(["ranks", "variant"])
    assert len(phases) == 9 and phases.loc[(4, "sharded"), "closed form, least"] == "14.1"
    # an update of 3.5 ms and broadcasts of 18, one after the other
    assert phases.loc[(4, "torch, sharded"), "closed form, rates of the kernels"] == "21.5"
    assert (
        "On 4 ranks of `h200-x4` *sharded* updates in 0.500 of the time of *plain*"
        in kernel_words.kernels(both)
    )
    parts = kernel_words.parts(both)
    assert (
        "On 4 ranks of `h200-x4` the closed form leaves 0.0 to 3.5 ms, but 10.5 ms of *torch, sharded*"
        in parts
    )
    assert parts.endswith("By the rates of the machine sharding in 4 rounds lengthens the phase; so it does.")
    assert "12.5 KiB on 2 ranks and 4.30 MiB on 4 ranks" in words.spread(both)
    assert (
        "has sent 1.515 · 4Ψ bytes by the counter, where a ring sends 1.50 · 4Ψ: nothing was"
        in words.counted(both)
    )

    frame = both.rows()
    four = (frame["world_size"] == 4) & (frame["moment"] == zero.TIMED)
    frame.loc[four & (frame["variant"] == "plain"), "link_sent_bytes"] *= 0.7
    frame.loc[four & (frame["variant"] == "overlapped"), "step_ms_p80"] = 230.0
    both._frame = frame
    assert "NCCL has reduced inside the switch" in words.counted(both)
    assert "0.918 × (ranges overlap), so these rows show no gain from it." in times.more_ranks(both)


def test_a_slower_step_is_called_slower(results_root, monkeypatch):
    chapter = chapter_of_steps(results_root, monkeypatch, sharded=200.0)
    assert "is met in memory (contexts 128 and 512) and missed in time (context 1024)." in times.peer(chapter)


def test_a_difference_within_noise_is_told(results_root, monkeypatch):
    chapter = chapter_of_steps(results_root, monkeypatch, sharded=161.0, overlapped=162.5)
    assert times.cost(chapter).count("1.01 ×; no more than A/A)") == 3
    assert times.cost(chapter).count("1.02 ×; ranges overlap)") == 3


def test_the_host_sets_the_pace_where_steps_do_not_grow(results_root, monkeypatch):
    # made up at 512 and 1024: 1.25 times the step at 128
    chapter = chapter_of_steps(results_root, monkeypatch, {512: 0.8, 1024: 1.6}, sharded=200.0)
    assert speed.host_paced(chapter) == [128, 512]
    said = times.pace(chapter)
    assert "128, 512 and 1024 a step without communication takes 150, 150 and 300 ms" in said
    assert "4.00 times the tokens of context 128, and the step takes 1.00 times as long" in said
    assert "rest on context 1024" in said
    assert times.cost(chapter).count("(paced by the host)") == 2
    assert "At contexts 128 and 512, paced by the host, *sharded* was slower both times" in times.peer(
        chapter
    )


def test_nothing_is_said_of_the_host_where_steps_grow_or_none_do(made_up, results_root, monkeypatch):
    assert times.pace(made_up) == ""
    chapter = chapter_of_steps(results_root, monkeypatch, {512: 0.8, 1024: 0.8})
    assert "No context here is long enough" in times.pace(chapter)


def test_what_the_profiler_stretches_is_told(made_up):
    rows = made_up.rows()
    rows.loc[(rows["variant"] == "sharded") & (rows["context_length"] == 128), "whole_ms"] = 38.5
    made_up._frame = rows
    assert "*sharded* spans 38.5 ms" in kernel_words.recorded(made_up)
    assert "torch" not in kernel_words.recorded(made_up)


def test_figure(made_up):
    figure = page.memory_figure(made_up, 128)
    assert [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes] == list(
        page.FIRST_STEP.values()
    )
    heights = sum(bar.get_height() for bar in figure.axes[2].patches)
    expected = sum(
        (1.01 + 1) * sum(zero.predicted(c).values())
        for c in zero.grid("full")
        if c.moment == "first_after" and c.context_length == 128 and c.world_size <= 2
    )
    assert heights == pytest.approx(expected / 2**30, rel=1e-3)


def test_figure_of_times(made_up):
    ax = speed.times_figure(made_up, 512).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "no communication", "plain", "sharded", "overlapped", "torch", "torch, sharded",
    ]  # fmt: skip
    assert len(ax.patches) == 6 * 3
    assert ax.patches[9].get_width() == 7.0  # the update alone, where the broadcasts are hidden


def test_page_without_rows():
    chapter = Chapter("zero", measure="no", preset="full")
    assert speed.times_figure(chapter, 128).axes
    for sentence in (
        words.first_step, words.saved, words.accuracy, words.spread, words.counted, words.source,
        times.noise, times.cost, kernel_words.kernels, kernel_words.parts, times.hidden, times.peer, times.containers,
        times.averaging,
    ):  # fmt: skip
        assert "not measured" in sentence(chapter), sentence
    for sentence in (words.rounding, words.crossover, words.on_device, times.pace, kernel_words.recorded):
        assert sentence(chapter) == "", sentence
    assert "neither is known" in words.break_even_words(chapter) and words.skipped(chapter) == ""
    assert set(page.moments_table(chapter, 128)["alive, GiB"]) == {"not measured"}
    assert page.components_table(chapter, 128)["parameters"].str.startswith("not measured / ").all()
    assert set(speed.times_table(chapter)["step"]) == {"not measured"}
    assert page.memory_figure(chapter, 128).axes
    assert speed.optimizer_table(chapter).empty and speed.traffic_table(chapter).empty
    assert speed.phases_table(chapter).empty


def test_tables_that_need_no_rows():
    table = page.prediction_table()
    assert list(table["together, GiB"][:2]) == ["29.8", "22.3"] and list(table["ranks"]) == [1, 2, 4, 8, 64]
    assert "1,998,235,200 in 435 tensors" in words.model_words()
    stages = speed.stages_table()
    assert list(stages["together, fp32"]) == ["29.8", "22.3", "18.6", "14.9"]
    sent = speed.traffic_formula_table().set_index("")
    assert list(sent["2 ranks"]) == ["7.44", "11.2", "7.44"]


# --------------------------------------------------------------------------------------------- GPUs
@pytest.mark.gpu
def test_on_gpus():
    """Every variant by NCCL, against the closed forms; each component to the block that the allocator rounds up to."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} are here")
    config = {"size": "tiny", "bucket_mb": 0.25}
    for variant in ("sharded", "torch_zero"):
        cases = [Case(variant, 64, moment, **config) for moment in STEP_MOMENTS]
        for case, row in zip(cases, zero.run_group(cases), strict=True):
            assert "status" not in row, row
            assert row["source"] == "allocator" and row["outside_bytes"] > 0
            for part in ("parameters", "gradients", "optimizer_state", "buckets"):
                slack = 32 * 512 if part != "buckets" else 1 << 20
                assert row[f"{part}_bytes"] == pytest.approx(zero.predicted(case)[part], abs=slack), (
                    case,
                    part,
                )
    cases = [Case(variant, 64, zero.TIMED, **config) for variant in zero.VARIANTS]
    found = dict(zip(zero.VARIANTS, zero.run_group(cases), strict=True))
    tensors = len(tensor_sizes(size("tiny")))
    for row in found.values():
        assert "status" not in row and row["step_ms_p50"] > 0, row
    assert found["sharded"]["broadcast_calls"] == tensors
    assert 0 < found["sharded"]["optimizer_launches"] < tensors / 2  # group calls
    assert found["plain"]["optimizer_launches"] == found["alone"]["optimizer_launches"] == 0
    assert found["sharded"]["update_ms"] > 0
