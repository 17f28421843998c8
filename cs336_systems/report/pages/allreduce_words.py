"""What chapter `allreduce` says: sentences whose numbers come from rows."""

from __future__ import annotations

from cs336_systems import accounting
from cs336_systems.experiments.allreduce import MB
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages.allreduce import NAMES, Ranks, bytes_words, measured, pairs, percent
from cs336_systems.report.tables import fmt

PROMISE = 0.03  # a bucket's all-reduce alone is to be this close to `dist.all_reduce` of as many bytes


def backend_words(chapter: Chapter) -> str:
    """NCCL against Gloo: how much faster with as many processes, at the smallest and the largest common size."""
    sets = {(r.machine, r.backend, r.world_size): r for r in measured(chapter)}
    said = []
    for (machine, backend, n), nccl in sets.items():
        gloo = sets.get((machine, "gloo", n))
        if backend != "nccl" or gloo is None:
            continue
        common = sorted(set(nccl.rows["num_bytes"]) & set(gloo.rows["num_bytes"]))
        ratios = {s: gloo.ms(s) / nccl.ms(s) for s in common}
        if not ratios:
            continue
        ends = dict.fromkeys((common[0], common[-1]))
        texts = [
            f"{fmt(ratios[s])} times at {bytes_words(s)} ({fmt(gloo.ms(s))} against {fmt(nccl.ms(s))} ms)"
            for s in ends
        ]
        most = max(ratios, key=ratios.__getitem__)
        said.append(
            f"- `{machine}`, {n} processes: NCCL between GPUs is faster than Gloo between CPU processes by"
            f" {' and '.join(texts)}; most at {bytes_words(most)}, {fmt(ratios[most])} times."
        )
    return "\n".join(said) or f"NCCL against Gloo with as many processes: {NOT_MEASURED}."


def size_words(chapter: Chapter) -> str:
    """How the time grows with the size in the smallest and in the largest steps that were measured."""
    said = []
    for ranks in measured(chapter):
        sizes = list(ranks.rows["num_bytes"])
        small = [s for s in sizes if s <= 64 * 2**10]
        large = [s for s in sizes if s >= 10 * MB]
        texts = [
            f"from {bytes_words(part[0])} to {bytes_words(part[-1])}, {part[-1] / part[0]:.0f} times the bytes, it"
            f" grows {fmt(ranks.ms(part[-1]) / ranks.ms(part[0]))} times"
            for part in (small, large)
            if len(part) > 1
        ]
        if texts:
            said.append(f"- `{ranks.machine}`, {ranks.label}: {'; '.join(texts)}.")
    return "\n".join(said) or f"How the time grows with the size: {NOT_MEASURED}."


def process_words(chapter: Chapter) -> str:
    """From the fewest processes to the most: what the ring predicts for bytes and for latency, and what was seen."""
    by_backend: dict[tuple[str, str], list[Ranks]] = {}
    for ranks in measured(chapter):
        if ranks.world_size > 1:
            by_backend.setdefault((ranks.machine, ranks.backend), []).append(ranks)
    said = []
    for (machine, backend), sets in by_backend.items():
        first, last = sets[0], sets[-1]
        common = sorted(set(first.rows["num_bytes"]) & set(last.rows["num_bytes"]))
        if len(sets) < 2 or not common:
            said.append(f"- `{machine}`, {NAMES[backend]}: measured with {first.world_size} processes only.")
            continue
        small, large = common[0], common[-1]
        steps = accounting.all_reduce_steps(last.world_size) / accounting.all_reduce_steps(first.world_size)
        factor = accounting.bus_factor(last.world_size) / accounting.bus_factor(first.world_size)
        grown = {s: fmt(last.ms(s) / first.ms(s)) for s in (small, large)}
        said.append(
            f"- `{machine}`, {NAMES[backend]}, from {first.world_size} to {last.world_size} processes: at"
            f" {bytes_words(large)} the time grows {grown[large]} times, where the bytes through each link grow"
            f" {fmt(factor)} times; at {bytes_words(small)} it grows {grown[small]} times, where the steps of the ring"
            f" grow {fmt(steps)} times."
        )
    return "\n".join(said) or f"How the time grows with the number of processes: {NOT_MEASURED}."


def fit_words(chapter: Chapter) -> str:
    """The reached bandwidth over the data sheet's, for NCCL; which sets the line describes worst."""
    said = []
    for ranks in measured(chapter):
        line, link = ranks.line, ranks.link_gb_per_s(chapter)
        if ranks.backend != "nccl" or line is None or ranks.world_size < 2:
            continue
        beta = line.bytes_per_s / 1e9 * accounting.bus_factor(ranks.world_size)
        best = float(ranks.rows["bus_gb_per_s"].max())
        share = f", {100 * best / link:.0f} % of the {fmt(link)} GB/s of the data sheet" if link else ""
        said.append(
            f"- `{ranks.machine}`, {ranks.label}: the line has β = {fmt(beta)} GB/s; the best bus bandwidth measured is"
            f" {fmt(best)} GB/s{share}. Latency {fmt(1e6 * line.latency_s)} µs, so half of the bandwidth is reached at"
            f" {bytes_words(line.half_bytes)}."
        )
    return "\n".join(said) or f"NCCL's latency and bandwidth: {NOT_MEASURED}."


def bucket_words(chapter: Chapter) -> str:
    """Whether a bucket's all-reduce costs what `dist.all_reduce` does, within 3 % or what the same case differs by."""
    found = list(pairs(chapter))
    if not found:
        return f"A bucket's all-reduce against `dist.all_reduce`: {NOT_MEASURED}."
    said = []
    for machine, backend in dict.fromkeys((p["machine"], p["backend"]) for p in found):
        part = [p for p in found if (p["machine"], p["backend"]) == (machine, backend)]
        within = [p for p in part if p["bucket"] - 1 <= PROMISE]
        noise = max(abs(p["again"] - 1) for p in part)
        worst = max(part, key=lambda p: p["bucket"])
        said.append(
            f"- `{machine}`, {NAMES[backend]}: a bucket's all-reduce takes at most {100 * PROMISE:.0f} % longer than"
            f" `dist.all_reduce` in {len(within)} of {len(part)} pairs; the largest difference is"
            f" {percent(worst['bucket'] - 1)}, at {bytes_words(worst['num_bytes'])} with {worst['world_size']}"
            f" processes. The same case measured twice differs by up to {fmt(100 * noise, 2)} %."
        )
    return "\n".join(said)


def host_words(chapter: Chapter) -> str:
    """Up to which size a series of all-reduces takes the host's time rather than the GPU's."""
    rows = chapter.measured(backend="nccl", how="all_reduce", repeat=0)
    said = []
    for (machine, n), part in rows.groupby(["machine", "world_size"]):
        part = part.sort_values("num_bytes")
        bound = part[part["host_ms"].astype(float) > 1.1 * part["ms_p50"].astype(float)]
        if bound.empty:
            said.append(
                f"- `{machine}`, {n} processes: the GPU sets the pace at every size that was measured."
            )
            continue
        least = part.iloc[0]
        said.append(
            f"- `{machine}`, {n} processes: at {bytes_words(least['num_bytes'])} the GPU needs"
            f" {fmt(1e3 * least['ms_p50'])} µs and the host, launching one after the other,"
            f" {fmt(1e3 * least['host_ms'])} µs; the host takes over a tenth longer up to"
            f" {bytes_words(bound['num_bytes'].max())}."
        )
    return "\n".join(said) or f"The host's time beside the GPU's: {NOT_MEASURED}."


def ddp_words(chapter: Chapter) -> str:
    """The size of buckets from which on latency costs little: where nine tenths of the bandwidth are reached."""
    said = []
    for ranks in measured(chapter):
        line = ranks.line
        if ranks.backend != "nccl" or line is None or ranks.world_size < 2:
            continue
        said.append(
            f"- `{ranks.machine}`, {ranks.world_size} GPUs: half of the bandwidth at {bytes_words(line.half_bytes)},"
            f" nine tenths at nine times that, {bytes_words(9 * line.half_bytes)}; a bucket of 25 MB reaches"
            f" {100 * 25 * MB / (25 * MB + line.half_bytes):.0f} %."
        )
    return "\n".join(said) or f"The size of buckets that the latency asks for: {NOT_MEASURED}."


def _agreement(error: float) -> str:
    return "exactly" if error == 0 else f"to {fmt(error, 2)} of the largest element"


def correct_words(chapter: Chapter) -> str:
    """How often cases were called, and that every measured case has added up its own data."""
    rows = chapter.measured()
    if rows.empty:
        return f"Whether sums are right: {NOT_MEASURED}."
    plain = rows[rows["how"] == "all_reduce"]["error"].astype(float)
    words = (
        f"Every one of the {len(rows)} measured cases was checked on its own data, warmed up by"
        f" {fmt(int(rows['warmups'].min()))} calls and timed in {fmt(int(rows['calls'].min()))} to"
        f" {fmt(int(rows['calls'].max()))}."
    )
    if len(plain):
        words += f" Sums agree {_agreement(float(plain.max()))}"
        mean = rows[rows["how"] == "bucket"]["error"].astype(float)
        words += f", means {_agreement(float(mean.max()))}." if len(mean) else "."
    return words
