"""Chapter checkpointing: its grid, strategies on a CPU against the closed forms, what a block saves, its page."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
import step_rows

from cs336_systems import accounting
from cs336_systems.chapters.checkpointing import measure as experiment
from cs336_systems.chapters.checkpointing import show as page
from cs336_systems.chapters.checkpointing.measure import Case
from cs336_systems.report.tables import printed
from cs336_systems.sizes import ModelConfig, size

torch = pytest.importorskip("torch")

from cs336_systems.chapters.checkpointing import strategies  # noqa: E402
from cs336_systems.chapters.shared.step import Workload  # noqa: E402
from cs336_systems.measure.clocks.turns import Candidate  # noqa: E402
from cs336_systems.measure.memory.tensors import watching_tensors  # noqa: E402
from cs336_systems.model import TransformerLM  # noqa: E402

GIB = 2**30
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


def laptop(case):
    """A made-up result of a case on a CPU, for tests/test_chapters.py."""
    kept = {"kept": "softmax:1x4096 mul:2x1024"} if case.strategy in ("none", "selective") else {}
    return {"step_ms_p50": 7.0, "activations_bytes": 2**20, "peak_bytes": 2**20, "forwards": 2.0} | kept


# ------------------------------------------------------------------------------------------------ grid
def test_the_best_size_and_its_neighbors_are_in_the_grid():
    """In the handout's model a block saves more than all checkpoints of one block: so one, half of one, and two."""
    cases = experiment.grid("full")
    for case in (Case("halves"), Case("blocks", 1), Case("blocks", 2)):
        assert case in cases
    peaks = {
        case: experiment.predicted_bytes(case, "cuda")
        for case in cases if case.num_layers == 0 and case.dtype == "tf32" and case.strategy != "nested"
    }  # fmt: skip
    assert min(peaks, key=lambda case: (peaks[case], case.repeat)) == Case("blocks", 1)


# ------------------------------------------------------------------------------------------------ measured
NARROW = ModelConfig(32, 96, 2, 4, vocab_size=16)  # its head is small, so that blocks make the peak


def measured(case):
    work = Workload(case.config, case.batch, case.context_length, "cpu")
    candidate = Candidate(case)
    strategies.prepare(candidate, work)
    return candidate.metrics, work


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(experiment, "size", lambda name: NARROW)
    return {"size": "tiny", "context_length": 96, "batch": 2, "dtype": "fp32"}


@without_gpu
@pytest.mark.parametrize("layers", [1, 4, 7])
@pytest.mark.parametrize("strategy", experiment.STRATEGIES)
def test_peaks_are_those_of_the_closed_form(strategy, layers, narrow):
    for block_size in (1, 2, 3, 9) if strategy == "blocks" else (0,):
        case = Case(strategy, block_size, num_layers=layers, **narrow)
        found, _ = measured(case)
        kept = sum(count * num_bytes for _, count, num_bytes in page.told(found.get("kept")))
        predicted = experiment.predicted_bytes(case, "cpu", kept)
        # a plan also keeps what its last block saves anyway, and here all, since calls and not matmuls take the time
        most = 0.02 if strategy != "selective" else 0.4
        assert found["activations_bytes"] == pytest.approx(predicted, rel=most)
        held = found["peak_bytes"] - found["activations_bytes"]
        assert held == pytest.approx(8 * accounting.num_parameters(case.config), rel=0.02)


@without_gpu
def test_strategies_grow_with_the_number_of_blocks_as_they_should(narrow):
    """In inputs of a block: none at all for a chain, one for each doubling of nested halves, one a block."""

    def growth(strategy, block_size=0):
        few, many = (measured(Case(strategy, block_size, num_layers=n, **narrow))[0] for n in (4, 16))
        inputs = accounting.residual_bytes(NARROW, narrow["batch"], narrow["context_length"])
        return (many["activations_bytes"] - few["activations_bytes"]) / inputs, many["forwards"]

    assert growth("chained") == (pytest.approx(0, abs=0.1), 2 + 15 * 14 / 32)
    assert growth("nested") == (pytest.approx(2, abs=0.1), 1 + math.log2(16) / 2 + 1 / 16)
    assert growth("blocks", 1) == (pytest.approx(12, abs=0.1), 2)
    assert growth("halves") == (pytest.approx(24, abs=0.1), 2)


@without_gpu
@pytest.mark.parametrize("strategy", experiment.STRATEGIES)
def test_gradients_are_those_without_checkpoints(strategy, narrow):
    case = Case(strategy, int(strategy == "blocks"), num_layers=3, **narrow)
    work = Workload(case.config, case.batch, case.context_length, "cpu")
    plain = copy.deepcopy(work.model)
    candidate = Candidate(case)
    strategies.prepare(candidate, work)
    work.drop_gradients()
    candidate.phases["step"]()
    logits = plain(work.ids)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), work.targets.flatten()).backward()
    for a, b in zip(work.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name, again", [("nested", 8 / 2 * 3 + 1), ("chained", 8 + 7 * 6 / 2)])
def test_the_pages_sketch_runs_and_repeats_as_many_blocks_as_the_page_says(name, again):
    notebook = Path(__file__).parents[1] / "book" / "checkpointing.ipynb"
    sources = ["".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]]
    [sketch] = re.findall(r"```python\n(.*?)```", "\n".join(sources), re.DOTALL)
    exec(sketch, names := {})
    blocks, x, runs = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8)), torch.randn(3, 4), []
    torch.nn.Sequential(*blocks)(x).square().sum().backward()
    expected = [p.grad.clone() for p in blocks.parameters()]
    blocks.zero_grad()
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    names[name](blocks, x).square().sum().backward()
    assert len(runs) == 8 + again
    torch.testing.assert_close([p.grad for p in blocks.parameters()], expected)


@without_gpu
def test_each_block_trades_what_it_saved_for_its_gradients(narrow):
    case = Case("none", num_layers=3, **narrow)
    found, work = measured(case)
    saved = sum(count * num_bytes for _, count, num_bytes in page.told(found["kept"]))
    assert saved == sum(accounting.saved_layer_bytes(NARROW, 2, 96, device="cpu").values())
    gradients = sum(p.nbytes for p in work.model.layers[0].parameters())
    assert [int(x) for x in found["backward_bytes_each"].split()] == [gradients - saved] * 3


@without_gpu
def test_what_residuals_looks_at_is_freed():
    """Softmax saves its own result: what packed it as it is would make a circle, which nothing breaks."""
    block = torch.nn.Softmax(-1)
    x = torch.randn(8, 64)
    with watching_tensors() as (_, snapshot):
        strategies.residuals(block, x)
        assert snapshot().active()[-1] == x.nbytes < snapshot().active().max()


@without_gpu
def test_residuals_carry_the_operations_that_saved_them():
    block, config = TransformerLM(16, 8, 32, 1, 4, 96, attention="reference").layers[0], NARROW
    x, rest = torch.randn(2, 8, 32), (torch.ones(8, 8), torch.zeros(8, 8))
    found = strategies.residuals(block, x, *rest)
    saved = accounting.saved_layer_bytes(config, 2, 8, device="cpu")
    of = lambda *names: sum(num_bytes for name, num_bytes in found if name in names)
    assert of("softmax", "masked_fill") == saved["attention"]
    assert of("matmul") == saved["qkv"]
    assert of("linear") == saved["projection_inputs"] + saved["attention_output"] + saved["swiglu"] // 4
    assert of("square", "rsqrt", "mul", "silu") == saved["norms"] + saved["swiglu"] // 4 * 3
    assert sum(saved.values()) == of(*dict(found))


def test_a_plan_under_autocast_leaves_no_copies_of_weights_behind():
    """Copies that were made without a graph would take the first block's gradients."""
    model, ids = TransformerLM(16, 8, 32, 2, 4, 96, attention="reference"), torch.randint(16, (2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            inputs = model.token_embeddings(ids), *model.positional_encoder(8)
            plan = strategies.checkpointing.choose(
                strategies.checkpointing.operations(model.layers[0], *inputs)
            )
        loss = strategies.selective(plan, model.layers, *inputs).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.layers.parameters())


# ------------------------------------------------------------------------------------------------ page
def frame(*given):
    fields = {f.name: f.default for f in dataclasses.fields(Case)}
    return step_rows.frame(experiment.TABLE, *given, **fields)


def test_strategies_stand_in_order_and_say_what_ran_out_of_memory():
    found = page.strategies(frame(
        {"strategy": "blocks", "block_size": 2, "activations_bytes": 3 * GIB, "peak_bytes": 4 * GIB},
        {"strategy": "none", "status": "oom"}, {"strategy": "blocks", "block_size": 1, "repeat": 1},
        {"strategy": "blocks", "block_size": 1, "step_ms_p50": 5.0}, {"strategy": "none", "num_layers": 4},
    ))  # fmt: skip
    assert found["checkpoints"].tolist() == ["none", "each block", "2 blocks"]
    assert found["measured, GiB"].tolist()[2] == 3.0 and printed(found)["measured, GiB"].tolist()[0] == "OOM"
    assert found["predicted, GiB"].tolist()[0] == experiment.predicted_bytes(Case("none"), "cuda") / GIB


def test_residuals_are_shares_of_all_that_a_block_saves():
    rows = frame(
        {"strategy": "none", "num_layers": 8, "kept": "softmax:1x2147483648 mul:2x335544320 rsqrt:2x32768",
         "backward_bytes_each": "-2500000000 -2600000000 -2600000000"},
        {"strategy": "none", "num_layers": 8, "kept": "other:1x1", "repeat": 1},
    )  # fmt: skip
    found = page.residuals(rows, 2048).head(2)
    assert found["operation"].tolist() == ["`softmax`", "`mul`"] and found["MiB"].tolist() == [2048, 640]
    assert found["shape"].tolist() == ["(B, H, S, S)", "(B, S, F)"]
    assert found["share"].sum() == pytest.approx(1, abs=1e-4) and page.residuals(rows, 128).empty
    line = page.with_predictions(rows).iloc[0]
    assert line["change_mib"] == -2_600_000_000 / 2**20
    assert line["gradients_mib"] == line["kept_mib"] + line["change_mib"]


def test_a_block_of_the_handouts_model():
    found, config = page.block_bytes(), size(experiment.XL)
    assert found["input"] * GIB == 4 * 4 * 2048 * config.d_model
    assert found["gradients"] * GIB == 4 * (16 * config.d_model**2 + 2 * config.d_model)
    assert found["saved"] > 32 * found["input"]


def test_the_figure_shows_each_strategy_once_with_its_numbers():
    fields = {"size": "small", "context_length": 512}
    chosen = [("none", 0), ("blocks", 1), ("blocks", 2), ("nested", 0), ("chained", 0)]
    given = [
        {"strategy": s, "block_size": k, "num_layers": n, "activations_bytes": GIB * n, "forwards": 2.0} | fields
        for n in (4, 8) for s, k in chosen
    ]  # fmt: skip
    drawn = page.depth_figure(frame(*given))
    names = [text.get_text() for text in drawn.legends[0].texts]
    assert names == ["none", "√N blocks", "each block", "nested halves", "chained"]
    assert all(list(line.get_ydata()) == [4, 8] for line in drawn.axes[0].lines[1::2])
    assert page.depth_figure(pd.DataFrame(frame(*given)[:0])).axes[0].texts[0].get_text() == "not measured"


# ------------------------------------------------------------------------------------------------ the real thing
@pytest.mark.gpu
def test_peaks_on_a_gpu():
    fields = {"size": "small", "num_layers": 8, "context_length": 512}
    cases = [Case(s, 2 * (s == "blocks"), **fields) for s in experiment.STRATEGIES if s != "selective"]
    for case, found in zip(cases, experiment.run_group(cases), strict=True):
        predicted = experiment.predicted_bytes(case, "cuda")
        assert found["activations_bytes"] == pytest.approx(predicted, rel=0.05), case
        assert found["peak_bytes"] > found["activations_bytes"] + 8 * accounting.num_parameters(case.config)
