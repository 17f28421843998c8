"""What chapter `leaderboard` shows: tables and figures from its rows. No torch, nothing measured here."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.experiments.leaderboard import OFFICIAL_MS
from cs336_systems.ladder import steps
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import EMPTY, fmt, percent, whole

HEADS, TOKENS, HEAD_DIM = steps.WORK.values()
OURS = ("flash_triton", "plain_triton")
HARNESS = {"kind": "harness", "leaves": "stacked"}
KERNEL = {"kind": "kernel", "grad_o": "matrix", "repeat": 0}
PARTS = {"forward": "forward", "backward": "backward"}
BYTES = 2
UNIT_NAMES = {
    "products": "tensor cores: products",
    "exps": "special function units: exponentials",
    "instructions": "schedulers: other instructions",
    "shared": "shared memory: operands of products",
}


def status_word(status: str) -> str:
    """What a cell says in place of a number: `OOM`, what is needed, or that it is not measured."""
    return {"oom": "OOM", "ok": EMPTY}.get(status, status)


def numbers(text: Any) -> list[float]:
    """The numbers of a cell that holds one for each turn; nothing for an empty one."""
    if text is None or (isinstance(text, float) and math.isnan(text)):
        return []
    return [float(part) for part in str(text).split(";") if part]


def work_flops(part: str) -> float:
    """FLOPs of the leaderboard's work: forward, backward or both."""
    return accounting.attention_flops(HEADS, TOKENS, TOKENS, HEAD_DIM, True, part)


def one(chapter: Chapter, machine: str, **where: Any) -> pd.Series | None:
    """The one measured row with these fields, or None."""
    found = chapter.measured(machine=machine, **({"repeat": 0} | where))
    return found.iloc[0] if len(found) == 1 else None


def best_ours(chapter: Chapter, machine: str, **where: Any) -> pd.Series | None:
    """The fastest of our implementations among measured rows with these fields."""
    found = chapter.measured(machine=machine, impl=list(OURS), repeat=0, **where)
    return None if found.empty else found.loc[found["ms_p50"].astype(float).idxmin()]


def published(chapter: Chapter) -> list[dict[str, Any]]:
    """Others' figures for this work (`results/published.csv`), fastest first."""
    path = chapter.root / "published.csv"
    if not path.is_file():
        return []
    frame = pd.read_csv(path)
    frame = frame[frame["chapter"].isin([chapter.name, "flash_bench"]) & (frame["metric"] == "end_to_end_ms")]
    return frame.sort_values("value").to_dict("records")


# ------------------------------------------------------------------------------------------------ the harness
def harness_table(chapter: Chapter, machine: str) -> pd.DataFrame:
    """The leaderboard's harness: medians of the short turns, the official number where it was taken, and what was
    published, fastest first."""
    rows = chapter.rows(machine=machine, **HARNESS, repeat=0)
    rows = rows[rows["rep_ms"] < OFFICIAL_MS]
    ours = best_ours(chapter, machine, **HARNESS, rep_ms=[int(r) for r in rows["rep_ms"].unique()])
    out = []
    for row in rows.to_dict("records"):
        ok = row["status"] == "ok"
        official = one(chapter, machine, **HARNESS, impl=row["impl"], rep_ms=OFFICIAL_MS)
        apart = one(chapter, machine, kind="harness", leaves="separate", impl=row["impl"])
        same_run = ok and ours is not None and row["run"] == ours["run"]
        out.append({
            "_ms": row["ms_p50"] if ok else math.inf,
            "implementation": figures.label(row["impl"]),
            "ms": fmt(row["ms_p50"], 4) if ok else EMPTY,
            "official": EMPTY if official is None else fmt(official["ms_mean"], 4),
            "3 leaves": EMPTY if apart is None else fmt(apart["ms_p50"], 4),
            "TFLOP/s": fmt(row["tflops"]) if ok else EMPTY,
            "over ours": f"{fmt(row['ms_p50'] / ours['ms_p50'])} ×" if same_run else EMPTY,
            "MHz": fmt(row["sm_mhz"], 4) if ok else EMPTY, "W": fmt(row["power_w"]) if ok else EMPTY,
            "source": "measured" if ok else status_word(row["status"]),
        })  # fmt: skip
    for figure in published(chapter) if (rows["seq_len"] == TOKENS).any() else []:
        out.append({
            "_ms": figure["value"], "implementation": figure["what"].split(" of the course")[0].split(" that an ")[0],
            "ms": fmt(float(figure["value"]), 4), "official": EMPTY, "3 leaves": EMPTY,
            "TFLOP/s": fmt(work_flops("end_to_end") / figure["value"] / 1e9), "over ours": EMPTY,
            "MHz": EMPTY, "W": EMPTY,
            "source": f"[published]({figure['source']})",
        })  # fmt: skip
    return pd.DataFrame(out).sort_values("_ms", kind="stable").drop(columns="_ms") if out else pd.DataFrame()


def smaller(chapter: Chapter) -> str:
    """What a caption adds where the shapes are not the leaderboard's: those of a machine without a GPU."""
    shapes = chapter.rows()[["heads", "seq_len"]].drop_duplicates()
    shapes = shapes[(shapes["heads"] != HEADS) | (shapes["seq_len"] != TOKENS)]
    words = [f"{heads} heads of {tokens} tokens" for heads, tokens in shapes.itertuples(index=False)]
    return f" A stand-in for a machine without a GPU: {', '.join(words)}." if words else ""


def turns_figure(chapter: Chapter, machine: str) -> Figure:
    """Each turn of the short harness: time over the case's own median, SM clock, power."""
    rows = chapter.measured(machine=machine, **HARNESS)
    rows = rows[rows["rep_ms"] < OFFICIAL_MS].sort_values("ms_p50")
    figure, axes = figures.panels(columns=3, height=0.9 + 0.24 * max(6, len(rows)), sharey=True)
    names = [figures.label(r.impl) + (" (again)" if r.repeat else "") for r in rows.itertuples()]
    columns = (("turns_ms", "time over median, %"), ("turns_mhz", "SM clock, MHz"), ("turns_w", "power, W"))
    for ax, (column, title) in zip(axes[0], columns, strict=True):
        ax.set_title(title)
        found = [numbers(cell) for cell in rows[column]]
        if not any(found):
            figures.nothing(ax)
            continue
        for place, (row, values) in enumerate(zip(rows.itertuples(), found, strict=True)):
            _, colour, _ = figures.look(row.impl, place)
            shown = [100 * (x / row.ms_p50 - 1) for x in values] if column == "turns_ms" else values
            ax.plot(shown, [place] * len(shown), "o", ms=4, alpha=0.7, color=colour)
            if shown:
                ax.plot([min(shown), max(shown)], [place] * 2, color=colour, lw=1)
        if column == "turns_ms":
            ax.axvline(0, color="#222222", lw=0.8)
        ax.margins(x=0.1)
    if len(rows):
        axes[0, 0].set_yticks(range(len(names)), names)
        axes[0, 0].invert_yaxis()
    return figure


# ------------------------------------------------------------------------------------------------ limits
def limits(part: str, sms: int, sm_mhz: float, capability: int = 90) -> dict[str, float]:
    """Unit → ms that the leaderboard's work needs there at the least, every pair visited once, five products
    backward."""
    sm, work = accounting.MULTIPROCESSORS[capability], work_of_a_pair(part)
    pairs = accounting.attention_exps(HEADS, TOKENS, TOKENS, True, part)
    return accounting.unit_ms(work, pairs, HEAD_DIM, sms, sm_mhz, sm)


def work_of_a_pair(part: str) -> accounting.Work:
    """What each unit has to do for a pair of query and key."""
    count = accounting.forward_work if part == "forward" else accounting.backward_work
    return count(HEAD_DIM, 128)


def by_hand(part: str) -> float:
    """Instructions for a pair that were counted on for the production kernels: forward, or two backward passes."""
    if part == "forward":
        return work_of_a_pair(part).instructions
    return sum(accounting.backward_work(HEAD_DIM, 128, passes).instructions for passes in ("queries", "keys"))


def limits_table(chapter: Chapter, roofs: Roofs, machine: str) -> pd.DataFrame:
    """What each unit needs for the leaderboard's work in ms, at the data sheet's clock; with roofs and our best
    time."""
    at = {part: limits(part, steps.SMS, steps.SM_MHZ) for part in PARTS}
    out = [{"limit": UNIT_NAMES[unit], **{p: fmt(at[p][unit]) for p in PARTS}} for unit in accounting_units()]
    out.append({
        "limit": "one after the other (shared memory beside products)",
        **{p: fmt(accounting.overlapped_ms(at[p], 0)) for p in PARTS},
    })  # fmt: skip
    moved = {p: accounting.attention_bytes(HEADS, TOKENS, TOKENS, HEAD_DIM, BYTES, p) for p in PARTS}
    memory, product = roofs.tb_per_s, roofs.tflops.get("bf16")
    out.append({
        "limit": "memory: best copy measured here",
        **{p: fmt(moved[p] / (memory * 1e9)) if memory else NOT_MEASURED for p in PARTS},
    })  # fmt: skip
    out.append({
        "limit": "products: best product measured here",
        **{p: fmt(work_flops(p) / (product * 1e9)) if product else NOT_MEASURED for p in PARTS},
    })  # fmt: skip
    line: dict[str, Any] = {"limit": "ours, kernels alone"}
    for part in PARTS:
        row = best_ours(chapter, machine, **headline(part))
        line[part] = NOT_MEASURED if row is None else fmt(row["ms_p50"])
    return pd.DataFrame([*out, line]).rename(columns={p: f"{p}, ms" for p in PARTS})


def accounting_units() -> tuple[str, ...]:
    """The four units, in the order of the tables."""
    return tuple(UNIT_NAMES)


def headline(part: str, grad_o: str = "matrix") -> dict[str, Any]:
    return {"kind": "kernel", "part": part, "seq_len": TOKENS, "head_dim": HEAD_DIM, "is_causal": True, "dtype": "bf16",
            "grad_o": grad_o}  # fmt: skip


# ------------------------------------------------------------------------------------------------ kernels
def kernel_table(chapter: Chapter, machine: str) -> pd.DataFrame:
    """GPU time of forward and backward by shape: ms, TFLOP/s, time over our best of the same run."""
    rows = chapter.rows(machine=machine, **KERNEL)
    out = []
    for shape, group in rows.groupby(["dtype", "head_dim", "is_causal"], sort=False):
        for impl in dict.fromkeys(group["impl"]):
            line = {"shape": shape_words(*shape), "implementation": figures.label(impl)}
            for part, letter in (("forward", "F"), ("backward", "B")):
                cell = group[(group["impl"] == impl) & (group["part"] == part)]
                cells = (EMPTY,) * 3
                if len(cell) and cell.iloc[0]["status"] == "ok":
                    row = cell.iloc[0]
                    ours = best_ours(
                        chapter, machine, kind="kernel", grad_o="matrix", part=part, dtype=shape[0], head_dim=shape[1],
                        is_causal=shape[2],
                    )  # fmt: skip
                    same = ours is not None and ours["run"] == row["run"]
                    ratio = f"{fmt(row['ms_p50'] / ours['ms_p50'])} ×" if same else EMPTY
                    cells = (fmt(row["ms_p50"]), fmt(row["tflops"]), ratio)
                elif len(cell):
                    cells = (short_status(cell.iloc[0]["status"]), EMPTY, EMPTY)
                line |= dict(
                    zip((f"{letter}, ms", f"{letter}, TFLOP/s", f"{letter}, over ours"), cells, strict=True)
                )
            out.append(line)
    return pd.DataFrame(out)


def short_status(status: str) -> str:
    """A status in a cell."""
    return "OOM" if status == "oom" else EMPTY if status == NOT_MEASURED else status.split(":")[0]


def shape_words(dtype: str, head_dim: int, is_causal: bool) -> str:
    """`bf16, d = 64, causal`."""
    return f"{dtype}, d = {head_dim}, {'causal' if is_causal else 'no mask'}"


def skipped(chapter: Chapter, machine: str) -> pd.DataFrame:
    """What was not run here, and what it needs."""
    rows = chapter.rows(machine=machine)
    rows = rows[rows["status"].str.startswith(("skipped", "error", "oom"))]
    found = rows.groupby(["impl", "status"], sort=False).size().reset_index(name="cases")
    found["impl"] = [figures.label(i) for i in found["impl"]]
    return found.rename(columns={"impl": "implementation or step", "status": "why"})


# ------------------------------------------------------------------------------------------------ counters
COUNTED_UNITS = {
    "tensor_pct": "tensor cores", "exp_pct": "special function units", "issue_pct": "schedulers",
    "shared_pct": "shared memory and L1", "l2_pct": "L2",
}  # fmt: skip


def counters_table(chapter: Chapter, machine: str) -> pd.DataFrame:
    """How busy each unit was, by head dimension, pass and implementation, and instructions issued for a pair."""
    out = []
    for row in chapter.rows(machine=machine, kind="counters", repeat=0).to_dict("records"):
        ok = row["status"] == "ok"
        out.append({
            "d": row["head_dim"], "pass": row["part"], "implementation": figures.label(row["impl"]),
            **{name: _share(row[unit]) if ok else EMPTY for unit, name in COUNTED_UNITS.items()},
            "bank conflicts": _share(row["conflict_pct"]) if ok else EMPTY,
            "instructions a pair": fmt(instructions_a_pair(row)) if ok else short_status(row["status"]),
        })  # fmt: skip
    return pd.DataFrame(out)


def _share(in_percent: Any) -> str:
    return percent(None if pd.isna(in_percent) else float(in_percent) / 100)


def instructions_a_pair(row: Any) -> float:
    """Instructions that the kernels of a row issued, by lanes, for each pair of query and key that must be visited."""
    pairs = accounting.attention_exps(row["heads"], row["seq_len"], row["seq_len"], True, row["part"])
    return 32 * float(row["instructions"]) / pairs


# ------------------------------------------------------------------------------------------------ first calls
def first_table(chapter: Chapter, machine: str) -> pd.DataFrame:
    """What the first call of both passes takes in a fresh process, the second, and the kernels compiled for them."""
    out = []
    for row in chapter.rows(machine=machine, kind="first", repeat=0).to_dict("records"):
        ok = row["status"] == "ok"
        launched = len(row["kernels"].split()) if ok and isinstance(row["kernels"], str) else 0
        out.append({
            "implementation": figures.label(row["impl"]),
            "first call, s": fmt(row["first_call_s"]) if ok else short_status(row["status"]),
            "second, ms": fmt(row["second_call_ms"]) if ok else EMPTY,
            "kernels launched": whole(launched or None),  # of ours alone they are counted
            "compiled": whole(row["compiled"] if ok else None),
            "for other lengths": whole(row["compiled_later"] if ok else None),
        })  # fmt: skip
    return pd.DataFrame(out)


# ------------------------------------------------------------------------------------------------ what is left
def gap_table(chapter: Chapter, roofs: Roofs, machine: str, impl: str) -> pd.DataFrame:
    """The harness's time of one of ours, taken apart: limits of both passes, what the kernels take beyond, the
    harness's own traffic at the best copy, and the rest. Empty where one of the parts is not measured."""
    parts = gap(chapter, roofs, machine, impl)
    if parts is None:
        return pd.DataFrame()
    total = sum(parts.values())
    return pd.DataFrame([
        {"part": name, "ms": fmt(ms), "share": f"{fmt(100 * ms / total, 2)} %"}
        for name, ms in (*parts.items(), ("the harness, one call", total))
    ])  # fmt: skip


def gap(chapter: Chapter, roofs: Roofs, machine: str, impl: str) -> dict[str, float] | None:
    """Part → ms; the parts add up to the harness's median. None where something is not measured."""
    whole = one(chapter, machine, **HARNESS, impl=impl, rep_ms=short_ms(chapter))
    forward = one(chapter, machine, **headline("forward"), impl=impl)
    backward = one(chapter, machine, **headline("backward"), impl=impl)
    if whole is None or forward is None or backward is None or not roofs.tb_per_s:
        return None
    out = {}
    for part, row in (("forward", forward), ("backward", backward)):
        floor = max(limits(part, roofs.sms or steps.SMS, float(row["sm_mhz"])).values())
        out[f"{part}: the slowest unit by the count by hand, at the clock seen"] = floor
        out[f"{part}: the kernels beyond that"] = float(row["ms_p50"]) - floor
    moved = accounting.harness_bytes(HEADS, TOKENS, HEAD_DIM, BYTES, stacked=True)
    out |= {f"harness: {name}, at the best copy": num / (roofs.tb_per_s * 1e9) for name, num in moved.items()}
    out["what remains: launches, caches emptied before each call, clocks"] = float(whole["ms_p50"]) - sum(
        out.values()
    )
    return out


def short_ms(chapter: Chapter) -> list[int]:
    return [int(r) for r in chapter.rows()["rep_ms"].unique() if r < OFFICIAL_MS]
