"""What chapter `ddp` expects of its rows: from the model's sizes, and from the rows of chapter `allreduce`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from cs336_systems import accounting
from cs336_systems.accounting import data_parallel as closed
from cs336_systems.measure import rows as store
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import ddp as page
from cs336_systems.report.roofs import machine_environment, roofs
from cs336_systems.report.tables import fmt, listed, si

_SOURCE = "measured in the [chapter on all-reduce](allreduce.ipynb)"


# ------------------------------------------------------------------------------------------------------ numbers
def _all_reduces(chapter: Chapter, machine: str, ranks: int) -> pd.DataFrame:
    """The rows of chapter `allreduce` for this chapter's backend and number of ranks, smallest tensors first."""
    path = store.csv_path("allreduce", machine, chapter.root)
    timed = page.timed(chapter, machine=machine, world_size=ranks)
    backends = {r["backend"] for r in timed if page.ok(r)}
    if not path.is_file() or len(backends) != 1:
        return pd.DataFrame()
    rows = pd.read_csv(path)
    chosen = (rows["status"] == "ok") & (rows["world_size"] == ranks) & (rows["backend"] == min(backends))
    return rows[chosen & (rows["how"] == "all_reduce") & (rows["repeat"] == 0)].sort_values("num_bytes")


def bandwidth(chapter: Chapter, machine: str, ranks: int) -> tuple[float, float, str] | None:
    """Bytes/s in one direction, seconds of a call, and where they come from; None if nothing is known.

    From the rows of chapter `allreduce`: its largest tensor, and the time of its smallest. Else half of what the data
    sheet gives for both directions, and no time for a call.
    """
    rows = _all_reduces(chapter, machine, ranks)
    if len(rows):
        return float(rows.iloc[-1]["bus_gb_per_s"]) * 1e9, float(rows.iloc[0]["ms_p50"]) / 1e3, _SOURCE
    sheet = accounting.peaks(machine_environment(machine, chapter.root).get("gpu", ""))
    if sheet is None or sheet.nvlink_gb_per_s is None:
        return None
    return sheet.nvlink_gb_per_s / 2 * 1e9, 0.0, "from the data sheet"


def messages_ms(chapter: Chapter, machine: str, ranks: int, sizes: Sequence[float]) -> float | None:
    """The time of all-reduces of these bytes, one after the other, in ms; None if nothing is known.

    Each by the times that chapter `allreduce` has measured for tensors of about its size: on the line between two of
    them in logarithms, and beyond the largest in proportion. Without such rows, from `bandwidth`.
    """
    rows = _all_reduces(chapter, machine, ranks)
    if len(rows):
        known, ms = (rows[c].to_numpy(float) for c in ("num_bytes", "ms_p50"))
        found = np.exp(np.interp(np.log(sizes), np.log(known), np.log(ms)))
        return float(np.sum(found * np.maximum(1, np.asarray(sizes) / known[-1])))
    link = bandwidth(chapter, machine, ranks)
    return None if link is None else closed.all_reduce_ms(sizes, ranks, link[0], link[1])


def copy_ms(chapter: Chapter, machine: str) -> tuple[float, str] | None:
    """The least time in ms to read and write all gradients once, and at what bandwidth; None if that is not known."""
    known = roofs(machine, chapter.root)
    speed, source = known.tb_per_s, "the best copy measured"
    if speed is None and known.sheet is not None:
        speed, source = known.sheet.tb_per_s, "data sheet"
    if speed is None:
        return None
    num_bytes = 2 * sum(closed.bucket_bytes(page.model_of(chapter)[0], 0))
    return num_bytes / speed / 1e9, f"{fmt(speed)} TB/s of the memory ({source})"


def after_ms(chapter: Chapter, machine: str, ranks: int, wrapper: str, bucket_mb: float) -> float | None:
    """What a way should have to wait for when the backward pass is over, in ms; None if that is not known.

    naive: all messages; flat: one of all gradients, and the copy before it; those that overlap: the last message.
    """
    config = page.model_of(chapter)[0]
    if wrapper in ("alone", "none", "torch", "torch_view"):
        return None
    if wrapper == "flat":
        copied = copy_ms(chapter, machine)
        sent = messages_ms(chapter, machine, ranks, closed.bucket_bytes(config, np.inf))
        return None if copied is None or sent is None else copied[0] + sent
    sizes = closed.bucket_bytes(config, bucket_mb * closed.MB)
    return messages_ms(chapter, machine, ranks, sizes if wrapper == "naive" else sizes[-1:])


def optimum(chapter: Chapter, machine: str, ranks: int) -> closed.Buckets | None:
    """The model of the buckets with the w and o of chapter `allreduce`; None where that is not known."""
    known = bandwidth(chapter, machine, ranks)
    if known is None or not known[1] or ranks < 2:
        return None
    total = sum(closed.bucket_bytes(page.model_of(chapter)[0], 0))
    return closed.Buckets(total, known[0] * total / closed.sent_bytes(total, ranks), known[1])


# ------------------------------------------------------------------------------------------------------ sentences
def size_words(chapter: Chapter) -> str:
    """What a step sends."""
    config, batch = page.model_of(chapter)
    numbers = sorted({page.settings(chapter)["world_size"], *(n for _, n in page.teams(chapter))})
    count = accounting.num_parameters(config)
    num_bytes = closed.FP32 * count
    sent = [f"{si(closed.sent_bytes(num_bytes, n), 'B')} on {n} ranks" for n in numbers]
    return (
        f"The model has {fmt(count / 1e6)} M parameters, so its fp32 gradients are $s$ = {si(num_bytes, 'B')} in"
        f" {len(closed.gradient_sizes(config))} tensors. Each rank sends, and receives, {listed(sent)} in a step,"
        f" whatever its batch ({batch} sequences here)."
    )


def time_words(chapter: Chapter) -> str:
    """How long sending should take, all together and apart, on each number of ranks that was measured."""
    config, batch = page.model_of(chapter)
    said = page.settings(chapter)
    sizes = closed.bucket_bytes(config, 0)
    lines = []
    for machine, ranks in page.teams(chapter):
        known = bandwidth(chapter, machine, ranks)
        if known is None:
            continue
        rate, call, source = known
        calls = f" and {fmt(call * 1e6)} µs a call" if call else ", were calls free"
        together = closed.all_reduce_ms([sum(sizes)], ranks, rate, call)
        apart = closed.all_reduce_ms(sizes, ranks, rate, call)
        text = (
            f"On {ranks} ranks of `{machine}`, at {fmt(rate / 1e9)} GB/s in each direction{calls} ({source}),"
            f" one all-reduce of everything takes {fmt(together)} ms, and one a parameter {fmt(apart)} ms."
        )
        if len(_all_reduces(chapter, machine, ranks)):
            slow = messages_ms(chapter, machine, ranks, sizes)
            text += (
                " That bandwidth is the largest tensor's. By the times of tensors of their own sizes, there, one a"
                f" parameter takes {fmt(slow)} ms: this is what *naive* should add to the step."
            )
        copied = copy_ms(chapter, machine)
        if copied is not None and page.timed(chapter, ("flat",), machine=machine, world_size=ranks):
            flat = after_ms(chapter, machine, ranks, "flat", 0.0)
            text += (
                f" *Flat* reads and writes all gradients once more, {fmt(copied[0])} ms at {copied[1]}, and should add"
                f" {fmt(flat)} ms."
            )
        roof = roofs(machine, chapter.root).tflops.get(said["dtype"])
        for context in page.contexts(page.timed(chapter)) if roof else ():
            flops = accounting.model_flops(config, batch, context, "forward_backward") * 2 / 3
            floor = fmt(flops / roof / 1e9)
            text += f" The products of the backward pass take at least {floor} ms at context {context}."
        lines.append(text)
    return "\n\n".join(lines) or f"The bandwidth between the ranks: {NOT_MEASURED}."


def optimum_words(chapter: Chapter) -> str:
    """The model's optimum with what the chapter on all-reduce has measured."""
    ranks = page.settings(chapter)["world_size"]
    lines = []
    for machine in chapter.machines:
        model = optimum(chapter, machine, ranks)
        if model is not None:
            lines.append(
                f"On `{machine}`, with $w$ = {fmt(model.bytes_per_s / 1e9)} GB/s and $o$ = {fmt(model.call_s * 1e6)} µs"
                f" ({_SOURCE}), $n_b^*$ = {fmt(model.best_num_buckets)}, of"
                f" {fmt(model.best_bucket_bytes / closed.MB)} MB, and the overhead is"
                f" {fmt(model.least_overhead_s * 1e3)} ms."
            )
    return "\n\n".join(lines) or f"The optimum with measured $w$ and $o$: {NOT_MEASURED}."
