"""What chapter `zero` shows of times and of what is sent: steps and their phases, the optimizer's kernels, formulas
beside counts. The sentences about times are in `zero_speed_words`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.accounting.zero import ADAMW_BYTES, SCHEMES
from cs336_systems.measure import rows as store
from cs336_systems.report import figures
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages.zero import (
    GIB,
    LABELS,
    TIMED,
    Row,
    contexts,
    head_of,
    one,
    records,
    there,
    unit,
    word,
    world_size,
)
from cs336_systems.report.roofs import roofs
from cs336_systems.report.tables import EMPTY, distance, fmt, overlap
from cs336_systems.sizes import size

ROUNDS = 4  # of ShardedOptimizer, by default
SHARDED = ("sharded", "overlapped", "torch_zero")  # variants whose ranks update a share each
SAME = 1.1  # steps of different contexts that are no further apart than this have one cause: it is not the GPU's work
NO_MORE = "no more than A/A"
PHASE_COLORS = {"optimizer": "#D55E00", "forward": "#0072B2", "backward": "#009E73"}


# ------------------------------------------------------------------------------------------------ predictions
def bandwidths(chapter: Chapter, machine: str) -> tuple[float, float, str] | None:
    """(memory in TB/s, link in GB/s in one direction, where they are from); None where the GPU is not known.

    The memory's is that of the best measured copy, where chapter `hardware` has it.
    """
    found = roofs(machine, chapter.root)
    if found.sheet is None or found.sheet.nvlink_gb_per_s is None:
        return None
    link, sheet = found.sheet.nvlink_gb_per_s / 2, "the data sheet"
    if found.tb_per_s is None:
        return found.sheet.tb_per_s, link, f"memory and link by {sheet}"
    return found.tb_per_s, link, f"memory by the best measured copy, link by {sheet}"


def teams(chapter: Chapter) -> list[tuple[str, int]]:
    """Machines and numbers of ranks whose steps were timed, those of the main tables first."""
    main = (chapter.machines or [""])[0], world_size(chapter)
    rows = chapter.measured(moment=TIMED, repeat=0)[["machine", "world_size"]].drop_duplicates()
    found = [(str(m), int(n)) for m, n in rows.itertuples(index=False)]
    return sorted(found, key=lambda team: (team != main, team[1], team[0]))


def other_teams(chapter: Chapter) -> list[tuple[str, int]]:
    """`teams` without that of the main tables."""
    main = (chapter.machines or [""])[0], world_size(chapter)
    return [team for team in teams(chapter) if team != main]


def all_reduce_gb_per_s(chapter: Chapter, machine: str) -> float | None:
    """What a rank sends, and receives, in the best all-reduce of chapter `allreduce`; None without its rows."""
    path = store.csv_path("allreduce", machine, chapter.root)
    if not path.is_file():
        return None
    rows = pd.read_csv(path)
    rows = rows[(rows["status"] == "ok") & (rows["backend"] == "nccl") & (rows["how"] == "all_reduce")]
    rows = rows[rows["world_size"] == world_size(chapter)]
    return float(rows["bus_gb_per_s"].max()) if len(rows) else None


def optimizer_ms(row: Row, tb_per_s: float, link_gb_per_s: float) -> dict[str, float]:
    """The closed form of the optimizer's step at these rates; torch's in one round. `phase`: that of the row's variant,
    the update alone where the next forward pass hides the broadcasts.
    """
    parameters = accounting.num_parameters(size(row["size"]))
    rounds = 1 if row["variant"] == "torch_zero" else ROUNDS
    ms = accounting.zero_optimizer_ms(
        parameters, int(row["world_size"]), tb_per_s, link_gb_per_s, rounds=rounds
    )
    whole = "sharded" if row["variant"] in SHARDED else "plain"
    return ms | {"phase": ms["update" if row["variant"] == "overlapped" else whole]}


def predicted_ms(chapter: Chapter, row: Row) -> dict[str, float] | None:
    """`optimizer_ms` at the rates of the row's machine, the least that they allow; None without a known link."""
    speeds = bandwidths(chapter, row["machine"])
    return None if speeds is None else optimizer_ms(row, *speeds[:2])


# ------------------------------------------------------------------------------------------------ (b) times
def quantiles(row: Row, phase: str) -> str:
    """`"12.3 (12.1 – 12.6)"`: median and the quantiles of 20 and 80 %, ms."""
    low, middle, high = (fmt(row[f"{phase}_ms_{q}"]) for q in ("p20", "p50", "p80"))
    return f"{middle} ({low} – {high})"


def times_table(chapter: Chapter) -> pd.DataFrame:
    """Times of the phases and of the step, and the step over that of torch's sharded optimizer in the same run."""
    out = []
    for row in there(records(chapter, moment=TIMED)):
        head = head_of(row) | {"ranks": int(row["world_size"]), "context": int(row["context_length"])}
        if row["variant"] == "alone":
            head["variant"] = "no communication"
        phases = (*chapter.experiment.PHASES, "step")
        line = head | {p: quantiles(row, p) if row["status"] == "ok" else word(row) for p in phases}
        line["tokens/s"] = fmt(row["tokens_per_s"]) if row["status"] == "ok" else EMPTY
        ratio = against(chapter, row, "torch_zero")
        out.append(line | {"over torch's sharded": EMPTY if ratio is None else f"{fmt(ratio)} ×"})
    return pd.DataFrame(out)


def times_figure(chapter: Chapter, context_length: int) -> Figure:
    """The medians of the phases, stacked, a bar for each variant; what sharding and hiding change is at the left."""
    figure, axes = figures.panels(height=2.6)
    ax, machine = axes[0, 0], (chapter.machines or [""])[0]
    where = {
        "machine": machine,
        "context_length": context_length,
        "world_size": world_size(chapter),
        "status": "ok",
    }
    rows = records(chapter, moment=TIMED, **where)
    if not rows:
        figures.nothing(ax)
        return figure
    for place, row in enumerate(rows):
        left = 0.0
        for phase in chapter.experiment.PHASES:
            ms = float(row[f"{phase}_ms_p50"])
            ax.barh(
                place, ms, 0.66, left=left, color=PHASE_COLORS[phase], zorder=3, label="" if place else phase
            )
            middle = (left + ms / 2, place)
            text = f"{ms:.0f}" if ms >= 10 else fmt(ms, 2)
            ax.annotate(text, middle, ha="center", va="center", fontsize=7, color="white", zorder=4)
            left += ms
        ax.annotate(f" {fmt(row['step_ms_p50'])} ms", (left, place), va="center", fontsize=8.5)
    names = [LABELS[row["variant"]] if row["variant"] != "alone" else "no communication" for row in rows]
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.1)
    ax.set_xlabel("ms; at the end of a bar: the median of whole steps")
    ax.set_title(f"{world_size(chapter)} ranks")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def against(chapter: Chapter, row: Row, variant: str, metric: str = "step_ms_p50") -> float | None:
    """A row's time over that of another variant of the same run; None unless both were measured."""
    keys = ("machine", "context_length", "size", "world_size", "batch", "bucket_mb")
    same = {key: row[key] for key in keys} | {"moment": TIMED, "repeat": 0}
    return chapter.ratio(metric, same | {"variant": row["variant"]}, same | {"variant": variant})


def profiled(chapter: Chapter, variant: str, team: tuple[str, int] | None = None) -> Row | None:
    """The row with the profile of a variant's optimizer step, of the main team or of this one; None without one."""
    row = one(
        chapter, variant=variant, moment=TIMED, context_length=contexts(chapter)[0], **_of(chapter, team)
    )
    return row if row is not None and row["whole_ms"] > 0 else None


def _of(chapter: Chapter, team: tuple[str, int] | None) -> dict[str, Any]:
    machine, ranks = team or ((chapter.machines or [""])[0], world_size(chapter))
    return {"machine": machine, "world_size": ranks}


def update_tb_per_s(row: Row) -> float:
    """At what rate the kernels of a profiled update move AdamW's bytes."""
    share = int(row["world_size"]) if row["variant"] in SHARDED else 1
    return ADAMW_BYTES * accounting.num_parameters(size(row["size"])) / share / row["update_ms"] / 1e9


def broadcast_gb_per_s(row: Row) -> float:
    """What a rank sends, and receives, on average while broadcasts run; they may wait for another rank meanwhile."""
    ranks = row["world_size"]
    return (ranks - 1) / ranks * row["broadcast_bytes"] / row["communication_ms"] / 1e6


def optimizer_table(chapter: Chapter) -> pd.DataFrame:
    """The optimizer's step on one GPU by torch's profiler, beside the least times of the closed form; ms."""
    out = []
    rows = there(records(chapter, moment=TIMED, context_length=contexts(chapter)[0]))
    for row in rows:
        if row["variant"] == "alone" or row["status"] != "ok" or not row["whole_ms"] > 0:
            continue
        least, sharded = predicted_ms(chapter, row), row["variant"] in SHARDED
        line = head_of(row) | {
            "launches": int(row["optimizer_launches"]),
            "updating": fmt(row["update_ms"]),
            "least updating": EMPTY,
            "sending": fmt(row["communication_ms"]),
            "least sending": EMPTY,
            "both at once": fmt(row["both_ms"]),
            "first to last kernel": fmt(row["whole_ms"]),
            "phase, not recorded": fmt(row["optimizer_ms_p50"]),
        }
        if least is not None:
            line["least updating"] = fmt(least["update" if sharded else "plain"])
            line["least sending"] = fmt(least["broadcast"]) if sharded else EMPTY
        out.append(line)
    return pd.DataFrame(out)


def phases_in_parts(chapter: Chapter, team: tuple[str, int] | None = None) -> list[dict[str, Any]]:
    """The optimizer's phase of each variant at the context that counts, beside the closed form: at the machine's rates
    (`least`), and at those of the profiled kernels (`rates`), with what that leaves (`rest`); ms. Of the main team, or
    of this one.
    """
    plain, found = profiled(chapter, "plain", team), []
    for variant in LABELS if plain is not None else ():
        where = {"context_length": decisive(chapter)} | _of(chapter, team)
        row = one(chapter, variant=variant, moment=TIMED, **where)
        if row is None or variant == "alone":
            continue
        sends = profiled(chapter, "sharded" if variant == "overlapped" else variant, team)
        if sends is None:
            continue
        least, phase = predicted_ms(chapter, row), float(row["optimizer_ms_p50"])
        link = (
            broadcast_gb_per_s(sends) if sends["communication_ms"] else 1.0
        )  # it sends nothing: any will do
        rates = optimizer_ms(row, update_tb_per_s(plain), link)["phase"]
        line = {"row": row, "phase": phase, "least": least and least["phase"], "rates": rates}
        found.append(line | {"rest": phase - rates})
    return found


def phases_table(chapter: Chapter) -> pd.DataFrame:
    """`phases_in_parts` of all teams as a table."""
    heads = {
        "phase": "measured",
        "least": "closed form, least",
        "rates": "closed form, rates of the kernels",
        "rest": "rest",
    }
    return pd.DataFrame(
        [
            head_of(part["row"]) | {head: fmt(part[key]) for key, head in heads.items()}
            for team in teams(chapter)
            for part in phases_in_parts(chapter, team)
        ]
    )


# ------------------------------------------------------------------------------------------------ what times mean
def timed(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """What the first machine has timed with the fewest ranks (or `where`), the second of A/A pairs included."""
    return chapter.measured(**({"moment": TIMED} | _of(chapter, None) | where))


def noise(chapter: Chapter, team: tuple[str, int] | None = None) -> dict[int, float]:
    """Context → how far the medians of its A/A pair lie apart (`tables.distance`); of the main team, or this."""
    rows = timed(chapter, **_of(chapter, team))
    keys = ["variant", "context_length", "size", "run"]
    both = rows[rows["repeat"] == 0].merge(rows[rows["repeat"] == 1], on=keys, suffixes=("", "_again"))
    apart = distance(both["step_ms_p50_again"].astype(float) / both["step_ms_p50"].astype(float))
    return dict(sorted(zip(both["context_length"].astype(int), apart, strict=True)))


def widths(chapter: Chapter) -> dict[int, float]:
    """Context → from the 20 % to the 80 % quantile of steps, as a share of the median: the widest of all variants."""
    rows = timed(chapter)
    wide = (rows["step_ms_p80"] - rows["step_ms_p20"]).astype(float) / rows["step_ms_p50"].astype(float)
    return {int(context): float(part.max()) for context, part in wide.groupby(rows["context_length"])}


def doubt(chapter: Chapter, row: Row, other: Row) -> str:
    """What speaks against a difference of two steps of a context: medians no further apart than those of the A/A pair,
    or ranges from 20 to 80 % that overlap; empty if nothing does.
    """
    known = noise(chapter, (row["machine"], int(row["world_size"])))
    if distance(row["step_ms_p50"] / other["step_ms_p50"]) <= known.get(int(row["context_length"]), 0.0):
        return NO_MORE
    return "ranges overlap" if overlap(row, other, "step_ms") else ""


def steps_alone(chapter: Chapter) -> dict[int, float]:
    """Context → ms of a step without communication."""
    rows = timed(chapter, variant="alone", repeat=0).sort_values("context_length")
    return {int(c): float(ms) for c, ms in zip(rows["context_length"], rows["step_ms_p50"], strict=True)}


def host_paced(chapter: Chapter) -> list[int]:
    """The contexts whose steps take no longer than the shortest context's, however much more work they are: the GPU is
    not what they wait for. Empty where no two are alike.
    """
    steps = steps_alone(chapter)
    alike = [context for context, ms in steps.items() if ms <= SAME * steps[min(steps)]]
    return alike if len(alike) > 1 else []


def decisive(chapter: Chapter) -> int:
    """The context whose times conclusions rest on: the longest, in which the GPU has most to do."""
    return max(steps_alone(chapter), default=contexts(chapter)[-1])


# ------------------------------------------------------------------------------------------------ (c) ZeRO stage 1
STAGES = {0: "plain data parallelism", 1: "ZeRO stage 1", 2: "ZeRO stage 2", 3: "ZeRO stage 3"}


def stages_table(name: str = "xl", ranks: int = 2) -> pd.DataFrame:
    """Memory of a rank by stage, in fp32 as here and in the paper's mixed precision; GiB."""
    parameters, out = accounting.num_parameters(size(name)), []
    for stage, label in STAGES.items():
        fp32 = accounting.zero_stage_bytes(parameters, ranks, stage, parameter=4, gradient=4, state=8)
        mixed = accounting.zero_stage_bytes(parameters, ranks, stage)
        line = {"": label} | {f"{part.replace('_', ' ')}, fp32": fmt(b / GIB) for part, b in fp32.items()}
        out.append(
            line | {"together, fp32": fmt(sum(fp32.values()) / GIB), "mixed": fmt(sum(mixed.values()) / GIB)}
        )
    return pd.DataFrame(out)


SCHEME_LABELS = {
    "ddp": ("all-reduce", EMPTY),
    "sharded": ("all-reduce", "broadcasts"),
    "zero1": ("reduce-scatter", "all-gather"),
}


def traffic_formula_table(name: str = "xl", ranks: Sequence[int] = (2, 4, 8)) -> pd.DataFrame:
    """What a rank sends in a step by the closed form, GiB, for each scheme and number of ranks."""
    num_bytes = 4 * accounting.num_parameters(size(name))
    names = {"ddp": "data parallelism", "sharded": "ShardedOptimizer", "zero1": "ZeRO stage 1"}
    out = []
    for scheme in SCHEMES:
        gradients, parameters = SCHEME_LABELS[scheme]
        line = {"": names[scheme], "gradients by": gradients, "parameters by": parameters}
        for count in ranks:
            parts = accounting.zero_step_bytes(scheme, count, num_bytes, num_bytes)
            line[f"{count} ranks"] = fmt(sum(parts.values()) / GIB)
        out.append(line)
    return pd.DataFrame(out)


def traffic_table(chapter: Chapter) -> pd.DataFrame:
    """What was counted in one step: calls and payload; what a rank sends for it, by formula and by the link."""
    name, scale = unit(chapter)
    out = []
    for row in there(records(chapter, moment=TIMED, context_length=contexts(chapter)[0])):
        if row["variant"] == "alone" or row["status"] != "ok" or pd.isna(row["all_reduce_calls"]):
            continue
        scheme = "sharded" if row["variant"] in SHARDED else "ddp"
        whole = 4 * accounting.num_parameters(size(row["size"]))
        ranks = int(row["world_size"])
        formula = sum(accounting.zero_step_bytes(scheme, ranks, whole, whole).values())
        line = head_of(row)
        for kind in ("all_reduce", "broadcast"):
            calls, num_bytes = row[f"{kind}_calls"], row[f"{kind}_bytes"]
            label = kind.replace("_", "-")
            line |= {f"{label}s": int(calls), f"{label}, {name}": fmt(num_bytes / scale) if calls else EMPTY}
        line |= {"sent, counted": fmt(sent_bytes(row) / scale), "sent, formula": fmt(formula / scale)}
        line["sent, link"] = EMPTY if pd.isna(row["link_sent_bytes"]) else fmt(row["link_sent_bytes"] / scale)
        out.append(line)
    return pd.DataFrame(out)


def sent_bytes(row: Row) -> float:
    """What a rank sends for the payload that was counted: twice for an all-reduce, once for a broadcast."""
    ranks = row["world_size"]
    return (ranks - 1) / ranks * (2 * row["all_reduce_bytes"] + row["broadcast_bytes"])
