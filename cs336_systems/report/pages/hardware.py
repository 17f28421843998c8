"""What chapter `hardware` shows: the machine's roofs beside its data sheet."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter, status_words
from cs336_systems.report.roofs import roofs
from cs336_systems.report.tables import EMPTY, distance, fmt, si


def _share(number: float | None, promised: float | None) -> str:
    return EMPTY if number is None or not promised else f"{100 * number / promised:.0f} %"


def roof_table(chapter: Chapter) -> pd.DataFrame:
    """One row for each roof: data sheet, best measured, the size it was reached at, and the share of the
    data sheet.
    """
    out = []
    for machine in chapter.machines or [""]:
        rows = chapter.rows(machine=machine)
        sheet = roofs(machine, chapter.root).sheet
        for kind, metric, unit in (("matmul", "tflops", "TFLOP/s"), ("copy", "tb_per_s", "TB/s")):
            for dtype in dict.fromkeys(rows[rows["kind"] == kind]["dtype"]):
                part = rows[(rows["kind"] == kind) & (rows["dtype"] == dtype)]
                fine = part[part["status"] == "ok"].dropna(subset=metric)
                promised = (
                    None
                    if sheet is None
                    else (sheet.tflops.get(dtype) if kind == "matmul" else sheet.tb_per_s)
                )
                best = fine.loc[fine[metric].astype(float).idxmax()] if len(fine) else None
                out.append({
                    "machine": machine or EMPTY,
                    "roof": f"product, {dtype}" if kind == "matmul" else "copy",
                    "unit": unit,
                    "data sheet": fmt(promised),
                    "measured": status_words(part.iloc[0]["status"]) if best is None else fmt(best[metric]),
                    "at size": EMPTY if best is None else figures.short(best["size"]),
                    "share": EMPTY if best is None else _share(best[metric], promised),
                    "error": EMPTY if best is None else fmt(best["error"], 2),
                })  # fmt: skip
    return pd.DataFrame(out)


def ridge_table(chapter: Chapter) -> pd.DataFrame:
    """For each dtype the FLOPs that one byte of memory traffic pays for: of the data sheet, and measured."""
    out = []
    for machine in chapter.machines:
        found = roofs(machine, chapter.root)
        for dtype, peak in found.tflops.items():
            sheet = found.sheet.tflops.get(dtype) if found.sheet else None
            out.append({
                "machine": machine, "dtype": dtype,
                "FLOP/byte, data sheet": fmt(sheet / found.sheet.tb_per_s if sheet else None),
                "FLOP/byte, measured": fmt(peak / found.tb_per_s if found.tb_per_s else None),
            })  # fmt: skip
    return pd.DataFrame(out)


def launch_table(chapter: Chapter) -> pd.DataFrame:
    """Microseconds a launch costs the host: one at a time, many in a row, and inside a CUDA graph."""
    rows = chapter.rows(kind=["launch", "launch_graph"], repeat=0)
    out = []
    for (machine, size), part in rows.groupby(["machine", "size"]):
        line: dict[str, Any] = {"machine": machine or EMPTY, "launches in a row": int(size)}
        for kind, head in (
            ("launch", "launched one by one, µs each"),
            ("launch_graph", "CUDA graph, µs each"),
        ):
            row = part[part["kind"] == kind]
            if row.empty:
                line[head] = EMPTY
            else:
                ok = row.iloc[0]["status"] == "ok"
                line[head] = fmt(row.iloc[0]["us_per_launch"]) if ok else status_words(row.iloc[0]["status"])
        out.append(line)
    return pd.DataFrame(out)


def collective_table(chapter: Chapter) -> pd.DataFrame:
    """The best bus bandwidth of an all-reduce, by backend and number of processes, beside the data sheet's links.

    The rows are chapter `allreduce`'s, of its reference machines: links are between GPUs, and the machine of this
    chapter may have only one. Empty where nothing of that chapter has been measured.
    """
    from cs336_systems.report.pages.allreduce import bytes_words, measured

    other = Chapter("allreduce", measure="no", preset="full", root=chapter.root)
    out = []
    for ranks in measured(other):
        bus = pd.to_numeric(ranks.rows["bus_gb_per_s"], errors="coerce")
        if bus.notna().any():
            best, link = bus.idxmax(), ranks.link_gb_per_s(other)
            out.append({
                "machine": ranks.machine, "all-reduce": ranks.label, "best bus bandwidth, GB/s": fmt(bus[best]),
                "at size": bytes_words(ranks.rows["num_bytes"][best]), "data sheet, GB/s": fmt(link),
                "share": _share(bus[best], link),
            })  # fmt: skip
    return pd.DataFrame(out)


def spread_table(chapter: Chapter) -> pd.DataFrame:
    """The A/A rows: the same case measured twice in one run, and how far the medians lie apart."""
    rows = chapter.rows()
    keys = ["machine", "kind", "dtype", "size"]
    both = rows[rows["repeat"] == 0].merge(
        rows[rows["repeat"] == 1], on=[*keys, "run"], suffixes=("", "_again")
    )
    out = [
        {
            "machine": r["machine"], "case": f"{r['kind']}, {r['dtype']}", "size": figures.short(r["size"]),
            "first, ms": fmt(r["ms_p50"]), "again, ms": fmt(r["ms_p50_again"]),
            "apart": f"{fmt(100 * distance(r['ms_p50_again'] / r['ms_p50']), 2)} %",
        }
        for _, r in both[both["status"] == "ok"].iterrows()
    ]  # fmt: skip
    return pd.DataFrame(out)


def roof_figure(chapter: Chapter, machine: str) -> Figure:
    """Products on the left (TFLOP/s over the side of the matrices), copies on the right (TB/s over bytes)."""
    rows = chapter.measured(machine=machine, repeat=0)
    sheet = roofs(machine, chapter.root).sheet
    figure, axes = figures.panels(columns=2, height=3.0)
    left, right = axes[0]
    figures.lines(left, rows[rows["kind"] == "matmul"], "size", "tflops", "dtype", log_y=True)
    left.set(title="square matrix product", xlabel="side of the matrices", ylabel="TFLOP/s")
    if left.get_legend_handles_labels()[0]:
        left.legend()
    copies = rows[rows["kind"] == "copy"].assign(dtype="copy")
    figures.lines(right, copies, "size", "tb_per_s", "dtype")
    if sheet is not None and len(copies):
        figures.roof(right, sheet.tb_per_s, "data sheet")
    right.set(title="copy in device memory", xlabel="bytes copied", ylabel="TB/s read and written")
    return figure


def summary(chapter: Chapter) -> str:
    """What the chapter found, as Markdown sentences made of rows; `not measured` where there are none."""
    if not chapter.machines:
        return f"The roofs: {NOT_MEASURED}."
    return "\n\n".join(_summary(chapter, machine) for machine in chapter.machines)


def _summary(chapter: Chapter, machine: str) -> str:
    found = roofs(machine, chapter.root)
    if not found.tflops or found.tb_per_s is None:
        return f"`{machine}`: {NOT_MEASURED}."
    fastest = max(found.tflops, key=found.tflops.__getitem__)
    words = [
        f"`{machine}` multiplies matrices at up to **{fmt(found.tflops[fastest])} TFLOP/s** ({fastest})"
        f" and copies at up to **{fmt(found.tb_per_s)} TB/s**"
    ]
    if found.sheet and fastest in found.sheet.tflops:
        words.append(
            f": {_share(found.tflops[fastest], found.sheet.tflops[fastest])} and"
            f" {_share(found.tb_per_s, found.sheet.tb_per_s)} of its data sheet"
        )
    ridge = found.tflops[fastest] / found.tb_per_s
    words.append(
        f". An operation in {fastest} needs about {fmt(ridge, 2)} FLOPs for each byte before computing takes"
        " longer."
    )
    if found.launch_us is not None:
        flops = found.launch_us * 1e-6 * found.tflops[fastest] * 1e12
        words.append(
            f" Launching a kernel costs the host {fmt(found.launch_us)} µs when launches follow each other"
            + (f", and {fmt(found.graph_us)} µs inside a CUDA graph" if found.graph_us is not None else "")
            + f"; in that time the machine could do {si(flops, 'FLOP')} of {fastest} products."
        )
    return "".join(words)
