"""Chapter hardware: its grid, what its rows hold, and that it runs on any CPU."""

import json

import pytest

from cs336_systems import chapters
from cs336_systems.chapters.hardware import measure as hardware
from cs336_systems.chapters.hardware import show as page
from cs336_systems.store import rows

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


def test_each_kind_fills_its_own_columns(smoke):
    """Rates follow from the median; products carry their error; a pair is measured in one run."""
    smoke, _ = smoke
    assert set(smoke["status"]) == {"ok"} and len(smoke) == len(hardware.grid("smoke"))
    rates = {"matmul": "tflops", "copy": "tb_per_s", "launch": "us_per_launch"}
    for kind, rate in rates.items():
        part = smoke[smoke["kind"] == kind]
        assert part[rate].gt(0).all() and part["ms_p50"].gt(0).all()
        assert part[[r for r in rates.values() if r != rate]].isna().all(axis=None)
        assert (part["ms_p20"] <= part["ms_p50"]).all() and (part["ms_p50"] <= part["ms_p80"]).all()
    for r in smoke.to_dict("records"):
        expected = {
            "matmul": 2 * r["size"] ** 3 / r["ms_p50"] / 1e9,
            "copy": 2 * r["size"] / r["ms_p50"] / 1e9,
            "launch": 1e3 * r["ms_p50"] / r["size"],
        }
        assert r[rates[r["kind"]]] == pytest.approx(expected[r["kind"]], rel=1e-4)
    error = smoke[smoke["kind"] == "matmul"].groupby("dtype")["error"].max()
    assert 0 < error["fp32"] < 1e-5
    assert 1e-4 < error["bf16"] < 1e-2  # rounding the result alone costs 2^-9 at most
    for _, pair in smoke[smoke.duplicated(["kind", "dtype", "size"], keep=False)].groupby("kind"):
        assert list(pair["repeat"]) == [0, 1] and pair["run"].nunique() == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    for case in (
        hardware.Case("matmul", "tf32", 512, 0),
        hardware.Case("copy", "bytes", 2**20, 0),
        hardware.Case("launch_graph", "fp32", 10, 0),
    ):
        [metrics] = hardware.run_group([case])
        assert metrics["ms_p50"] > 0


# ----------------------------------------------------------------------------------------------- the page
def test_frames_of_measured_rows(smoke, results_root):
    smoke, machine = smoke[0], "cpu-9"
    rows.write(hardware.TABLE, machine, smoke.assign(env="e").to_dict("records"), results_root)
    (results_root / "reference.json").write_text(json.dumps({"hardware": [machine]}))
    chapter = chapters.read("hardware")
    table = page.roof_table(chapter).set_index("roof")
    best = smoke[(smoke["kind"] == "matmul") & (smoke["dtype"] == "fp32")]["tflops"].max()
    assert table.loc["GEMM, fp32", "measured"] == pytest.approx(best, rel=1e-4)
    copy = table.loc["copy", "measured"]
    assert table.loc["GEMM, fp32", "ridge, FLOP/byte"] == pytest.approx(best / copy, rel=1e-3)
    assert table["data sheet"].isna().all()  # of an unknown CPU
    assert page.launch_table(chapter)["one by one, µs each"].gt(0).all()
    assert page.links_table(chapter).empty
    points = page.roofline_points(chapter)
    assert set(points["kernel"]) == {"GEMM"} and (points["intensity"] == points["size"] / 3).all()


def test_the_roofline_holds_kernels_of_one_machine(project_root, monkeypatch):
    monkeypatch.setenv("CS336_RESULTS", str(project_root / "results"))
    one, other, both = (
        page.roofline_points(chapters.read("hardware", machine=machine))
        for machine in ("h200-x1", "h100-x1", "h200-x1,h100-x1")
    )
    assert len(one) and both.equals(one)
    attention = [points[points["kernel"] == "attention, ours"]["tflops"].tolist() for points in (one, other)]
    assert attention[0] != attention[1]
