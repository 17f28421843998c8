"""Figures of the rows of several machines show one of them, and ratios are of one run."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import step_rows
import training_rows
from matplotlib.text import Text
from test_unit_report_build import write_headline

from cs336_systems import chapters
from cs336_systems.chapters.attention.show import memory_figure
from cs336_systems.chapters.benchmarking.show import contexts_figure
from cs336_systems.chapters.checkpointing.show import depth_figure
from cs336_systems.chapters.flash_bench.show import kernel_figure
from cs336_systems.chapters.index import show as headline
from cs336_systems.chapters.leaderboard.show import models_figure, shapes_figure
from cs336_systems.chapters.mixed_precision.show import blocks_figure
from cs336_systems.chapters.training import show_matrix, show_sweep


def made_up(case):
    """Numbers for all columns that the figures below draw."""
    table = chapters.load(type(case).__module__.split(".")[2])
    size = sum(value for value in vars(case).values() if isinstance(value, int | float))
    return {
        m: float(size)
        for m in table.metrics
        if m.endswith(("_ms_p50", "_gpu_ms", "_gib", "forwards", "_bytes"))
    }


FIGURES = {
    "attention": (lambda rows: memory_figure(rows[rows["head_dim"] == 64], 24), made_up),
    "benchmarking": (lambda rows: contexts_figure(rows, {}), step_rows.metrics),
    "checkpointing": (depth_figure, made_up),
    "flash_bench": (lambda rows: kernel_figure(rows[rows["heads"] == 1], ("bf16",)), made_up),
    "leaderboard_models": (models_figure, lambda case: {"ms_p50": 1.0 + len(case.impl), "tflops": 9.0}),
    "leaderboard_shapes": (shapes_figure, lambda case: {"ms_p50": 1.0 + len(case.impl), "tflops": 9.0}),
    "mixed_precision": (lambda rows: blocks_figure(rows[rows["kind"] == "step"]),
                        lambda case: step_rows.metrics(case.step) if case.kind == "step" else {}),
    "training": (show_matrix.matrix_figure, training_rows.metrics),
    "training_sweep": (show_sweep.scaling, training_rows.metrics),
    "training_sweep ": (show_sweep.heat, training_rows.metrics),
    "training_sweep  ": (show_sweep.bars, training_rows.metrics),
}  # fmt: skip


def drawn(figure):
    """What a figure's panels hold: lines, bars, texts, and the words around them."""
    figure.draw_without_rendering()
    plt.close(figure)
    return [
        (
            [np.asarray(line.get_xydata(), float).round(9).tolist() for line in ax.lines],
            [
                np.round(patch.get_bbox().bounds, 9).tolist()
                for patch in ax.patches
                if hasattr(patch, "get_bbox")
            ],
            [text.get_text() for text in ax.findobj(Text)],
        )
        for ax in figure.axes
    ]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_two_machines_shows_the_first(name, results_root):
    (figure, make), table = FIGURES[name], chapters.load(name.strip())
    step_rows.write(table, table.grid("full"), results_root, "a", make)
    first = chapters.read(chapters.chapter_of(table.name), preset="full", machine="a", root=results_root)
    rows = next(found for found in first.tables if found.experiment is table).rows()
    numbers = [column for column in table.metrics if pd.api.types.is_float_dtype(rows[column])]
    other = rows.assign(
        machine="b", run=rows["run"] + "b", **{column: 3 * rows[column] for column in numbers}
    )
    alone = drawn(figure(rows))
    assert any(part for panel in alone for part in panel)
    both = pd.concat([rows, other], ignore_index=True)
    assert repr(drawn(figure(both))) == repr(alone)  # NaN included


def test_the_headlines_ratios_are_of_one_run(results_root):
    write_headline(results_root)
    for name in (
        "leaderboard",
        "ddp",
    ):  # the row that others are held against is measured again, on another day
        path = results_root / "x" / f"{name}.csv"
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        again = (rows["impl"] == "flash_triton") if name == "leaderboard" else (rows["wrapper"] == "none")
        rows.loc[again, "run"] = "later"
        rows.to_csv(path, index=False)
    attention, overlap = (
        headline.attention().set_index(["impl", "repeat"]),
        headline.overlap().set_index("label"),
    )
    assert attention.loc[("flash_triton", 0), "over_ours"] == 1 and np.isnan(
        attention.loc[("fa4", 0), "over_ours"]
    )
    assert overlap["exposed_ms"]["no communication"] == 0 and np.isnan(overlap["exposed_ms"]["naive"])
