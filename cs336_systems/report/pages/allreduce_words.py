"""What chapter `allreduce` says: sentences whose numbers come from rows."""

from __future__ import annotations

from typing import Any

from cs336_systems import accounting
from cs336_systems.experiments.allreduce import MB
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages.allreduce import (
    BUCKETS,
    NAMES,
    Ranks,
    bytes_words,
    gradient_bytes,
    measured,
    pairs,
    percent,
    place_of,
)
from cs336_systems.report.tables import distance, fmt

PROMISE = 0.03  # a bucket's all-reduce alone is to be this close to `dist.all_reduce` of as many bytes
NEAR = 0.1  # what is closer than this to a prediction counts as having met it
RISES = 0.05  # bus bandwidth with more processes above that with fewer: from here on it is told


def size_words(chapter: Chapter) -> str:
    """How the time grows with the size in the smallest and in the largest steps that were measured."""
    said = []
    for ranks in measured(chapter):
        sizes = list(ranks.rows["num_bytes"])
        small = [s for s in sizes if s <= 64 * 2**10]
        large = [s for s in sizes if s >= 10 * MB]
        texts = [
            f"{part[-1] / part[0]:.0f} times the bytes, from {bytes_words(part[0])} to {bytes_words(part[-1])}, take"
            f" {fmt(ranks.ms(part[-1]) / ranks.ms(part[0]))} times as long"
            for part in (small, large)
            if len(part) > 1
        ]
        if len(large) > 1:
            first, last = (s / ranks.ms(s) / 1e6 for s in (large[0], large[-1]))
            grown = last / first - 1
            way = "rises" if grown > NEAR else "falls" if grown < -NEAR else "stays within a tenth"
            texts[-1] += f" (the bandwidth {way}: {fmt(first)} and {fmt(last)} GB/s)"
        if texts:
            said.append(f"- `{ranks.machine}`, {ranks.label}: {'; '.join(texts)}.")
    return "\n".join(said) or f"How the time grows with the size: {NOT_MEASURED}."


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
        between = "" if most in ends else f"; most at {bytes_words(most)}, {fmt(ratios[most])} times"
        said.append(
            f"- `{machine}`, {n} processes: Gloo between CPU processes takes longer than NCCL between GPUs by"
            f" {' and '.join(texts)}{between}."
        )
    return "\n".join(said) or f"NCCL against Gloo with as many processes: {NOT_MEASURED}."


def sheet_words(chapter: Chapter) -> str:
    """NCCL against a ring at the data sheet's bandwidth: how much of the difference is the smallest tensor's time."""
    said = []
    for ranks in measured(chapter):
        sizes = [s for s in ranks.rows["num_bytes"] if s >= MB]
        if not sizes or ranks.sheet_ms(chapter, sizes[0]) is None:
            continue
        least = ranks.rows.iloc[0]
        times, shares = [], []
        for s in dict.fromkeys((sizes[0], sizes[-1])):
            ms, sheet = ranks.ms(s), ranks.sheet_ms(chapter, s)
            times.append(f"{fmt(ms / sheet)} times as long at {bytes_words(s)}")
            if least["num_bytes"] < s and ms - sheet > least["ms_p50"]:
                shares.append(f"{100 * least['ms_p50'] / (ms - sheet):.0f} % at {bytes_words(s)}")
        text = (
            f"- `{ranks.machine}`, {ranks.label}: against a ring without latency at the data sheet's bandwidth,"
            f" {' and '.join(times)}."
        )
        if shares:
            text += (
                f" What even {bytes_words(least['num_bytes'])} take, {fmt(1e3 * least['ms_p50'])} µs, is"
                f" {' and '.join(shares)} of the difference; the rest is bandwidth."
            )
        said.append(text)
    return (
        "\n".join(said) or f"NCCL against the data sheet: {NOT_MEASURED}, or the GPU's links are not known."
    )


def process_words(chapter: Chapter) -> str:
    """From the fewest processes to each larger number: what the ring predicts for bytes and for steps, what was seen.

    Where only one number of processes was measured: what the ring predicts for the others of the grid. NCCL on machines
    with the same GPU counts as one series.
    """
    by_backend: dict[tuple[str, str], dict[int, Ranks]] = {}
    for ranks in measured(chapter):
        if ranks.world_size > 1:
            key = place_of(chapter, ranks), ranks.backend
            by_backend.setdefault(key, {}).setdefault(ranks.world_size, ranks)
    said = []
    for (_, backend), by_number in by_backend.items():
        sets = [by_number[n] for n in sorted(by_number)]
        first = sets[0]
        common = sorted(set.intersection(*(set(ranks.rows["num_bytes"]) for ranks in sets)))
        machines = dict.fromkeys(f"`{ranks.machine}`" for ranks in sets)
        where = f"- {' and '.join(machines)}, {NAMES[backend]}"
        if len(sets) < 2 or not common:
            words = f"{where}: measured with {first.world_size} processes only"
            said.append(f"{words}{_predicted(chapter, first)}.")
            continue
        small, large = common[0], common[-1]
        grown = []
        for ranks in sets[1:]:
            factor = accounting.bus_factor(ranks.world_size) / accounting.bus_factor(first.world_size)
            steps = accounting.all_reduce_steps(ranks.world_size) / accounting.all_reduce_steps(
                first.world_size
            )
            grown.append(
                f"from {first.world_size} to {ranks.world_size} processes, {fmt(ranks.ms(large) / first.ms(large))}"
                f" times at {bytes_words(large)}, where the bytes through each link grow {fmt(factor)} times, and"
                f" {fmt(ranks.ms(small) / first.ms(small))} times at {bytes_words(small)}, where the steps of the ring"
                f" grow {fmt(steps)} times"
            )
        text = f"{where}: the time grows {'; '.join(grown)}."
        if large >= 10 * MB:
            text += _bus_words(sets, [s for s in common if s >= 10 * MB], len(machines))
        said.append(text + _latency_words(first, sets[-1], small))
    return "\n".join(said) or f"How the time grows with the number of processes: {NOT_MEASURED}."


def _bus_words(sets: list[Ranks], sizes: list[int], num_machines: int) -> str:
    """The bus bandwidth of the largest tensors with more processes over that with the fewest, which should be 1."""
    first, *more = sets

    def share(ranks: Ranks, num_bytes: int) -> float:
        factor = accounting.bus_factor(ranks.world_size) / accounting.bus_factor(first.world_size)
        return factor * first.ms(num_bytes) / ranks.ms(num_bytes)

    shares = [share(ranks, sizes[-1]) for ranks in more]
    text = (
        f" At {bytes_words(sizes[-1])} the bus bandwidth with {' and '.join(str(r.world_size) for r in more)} processes"
        f" is {' and '.join(f'{100 * s:.0f} %' for s in shares)} of that with {first.world_size}"
    )
    if min(shares) > 1 + RISES:
        most, at = max((share(ranks, s), s) for ranks in more for s in sizes)
        at_most = "" if at == sizes[-1] else f", and {100 * most:.0f} % at {bytes_words(at)}"
        machines = ", nor how much of it is the machines' difference" if num_machines > 1 else ""
        text += f"{at_most}: it should not depend on their number, and rises"
        return f"{text}; why, these rows do not tell{machines}."
    rated = "hardly take" if min(shares) > 1 - NEAR else "take"
    return f"{text}: they {rated} bandwidth from one another."


def _latency_words(few: Ranks, many: Ranks, num_bytes: int) -> str:
    """Where the smallest tensor's time grows less than a ring's steps: what a step takes, and what is in none."""
    steps = [accounting.all_reduce_steps(ranks.world_size) for ranks in (few, many)]
    us = [1e3 * ranks.ms(num_bytes) for ranks in (few, many)]
    if us[1] / us[0] > (1 - NEAR) * steps[1] / steps[0]:
        return ""
    text = f" At {bytes_words(num_bytes)} the time grows less than the steps"
    step = (us[1] - us[0]) / (steps[1] - steps[0])
    if step <= 0:
        return f"{text}."
    return (
        f"{text}: were these rings, a step would take {fmt(step)} µs, and {fmt(us[0] - steps[0] * step)} µs of a call"
        " would belong to none."
    )


def _predicted(chapter: Chapter, ranks: Ranks) -> str:
    """What a ring of the same bus bandwidth takes for the largest tensor with more processes of the grid."""
    grid = chapter.rows(machine=ranks.machine, backend=ranks.backend)
    others = [int(n) for n in sorted(grid["world_size"].unique()) if n > ranks.world_size]
    row = ranks.rows.iloc[-1]
    if not others or row["num_bytes"] < 10 * MB:
        return ""
    factor = accounting.bus_factor(ranks.world_size)
    texts = [f"{fmt(row['ms_p50'] * accounting.bus_factor(n) / factor)} ms with {n}" for n in others]
    return f"; at the same bus bandwidth, a ring would take for {bytes_words(row['num_bytes'])} {', '.join(texts)}"


def fit_words(chapter: Chapter) -> str:
    """The bandwidth of the line and the best that was measured, over the data sheet's, for NCCL."""
    said = []
    for ranks in measured(chapter):
        line, link = ranks.line, ranks.link_gb_per_s(chapter)
        if ranks.backend != "nccl" or line is None or ranks.world_size < 2:
            continue
        beta = line.bytes_per_s / 1e9 * accounting.bus_factor(ranks.world_size)
        best = float(ranks.best["bus_gb_per_s"])
        share = f", {100 * best / link:.0f} % of the {fmt(link)} GB/s of the data sheet" if link else ""
        above = (
            ". So β is no limit here, but a compromise between sizes: the bandwidth still grows where the line's has"
            " leveled off"
            if best > (1 + NEAR) * beta
            else ""
        )
        said.append(
            f"- `{ranks.machine}`, {ranks.label}: the line has β = {fmt(beta)} GB/s; the best bus bandwidth measured is"
            f" {fmt(best)} GB/s, at {bytes_words(ranks.best['num_bytes'])}{share}{above}. The line's latency is"
            f" {fmt(1e6 * line.latency_s)} µs, and half of its bandwidth is reached at {bytes_words(line.half_bytes)}."
        )
    return "\n".join(said) or f"NCCL's latency and bandwidth: {NOT_MEASURED}."


def noise_words(chapter: Chapter) -> str:
    """Whether the line's misses are noise: beside the quantiles of the calls, and the same case measured twice."""
    pairs_of = _by_backend(chapter)
    said = []
    for ranks in measured(chapter):
        line, rows = ranks.line, ranks.rows
        if line is None:
            continue
        ms = [1e3 * line.seconds(x) for x in rows["num_bytes"]]
        outside = int(((rows["ms_p20"] > ms) | (rows["ms_p80"] < ms)).sum())
        again = [
            distance(p["again"])
            for p in pairs_of.get((ranks.machine, ranks.backend), [])
            if p["world_size"] == ranks.world_size
        ]
        twice = (
            f"; the same case measured twice differs by up to {fmt(100 * max(again), 2)} %" if again else ""
        )
        said.append(
            f"- `{ranks.machine}`, {ranks.label}: the line misses by up to"
            f" {fmt(100 * max(map(abs, line.residuals)), 2)} %, and leaves the quantiles of the calls at {outside} of"
            f" {len(rows)} sizes{twice}."
        )
    return "\n".join(said) or f"Residuals beside the noise: {NOT_MEASURED}."


def _by_backend(chapter: Chapter) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair in pairs(chapter):
        found.setdefault((pair["machine"], pair["backend"]), []).append(pair)
    return found


def bucket_words(chapter: Chapter) -> str:
    """Whether a bucket's all-reduce costs what `dist.all_reduce` does, within 3 %; if not, whether bytes explain it."""
    said = []
    for (machine, backend), part in _by_backend(chapter).items():
        within = [p for p in part if p["bucket"] - 1 <= PROMISE]
        noise = max(distance(p["again"]) for p in part)
        text = (
            f"- `{machine}`, {NAMES[backend]}: a bucket's all-reduce takes at most {100 * PROMISE:.0f} % longer than"
            f" `dist.all_reduce` in {len(within)} of {len(part)} pairs"
        )
        if len(within) < len(part):
            worst = max(part, key=lambda p: p["bucket"])
            text += (
                f"; it is furthest off at {bytes_words(worst['num_bytes'])} with {worst['world_size']} processes,"
                f" {percent(worst['bucket'] - 1)}"
            )
        said.append(
            f"{text}. The same case measured twice differs by up to {fmt(100 * noise, 2)} %.{_excess(part)}"
        )
    return "\n".join(said) or f"A bucket's all-reduce against `dist.all_reduce`: {NOT_MEASURED}."


def _excess(part: list[dict[str, Any]]) -> str:
    """Where a bucket takes too long at the smallest size of a set of processes: what it is at the next one."""
    texts, growths = [], []
    for n in dict.fromkeys(p["world_size"] for p in part):
        of_n = [p for p in part if p["world_size"] == n]
        if len(of_n) < 2 or of_n[0]["bucket"] - 1 <= PROMISE:
            continue
        small, large = of_n[:2]
        growths.append(large["more_ms"] / small["more_ms"] / (large["num_bytes"] / small["num_bytes"]))
        texts.append(
            f"{_duration(small['more_ms'])} at {bytes_words(small['num_bytes'])} and {_duration(large['more_ms'])} at"
            f" {bytes_words(large['num_bytes'])} with {n} processes"
        )
    if not texts:
        return ""
    text = f" What it takes more is {'; '.join(texts)}."
    if max(growths) > 0.5:
        return f"{text} That grows with the bytes."
    if part[0]["backend"] == "gloo":
        return (
            f"{text} That does not grow as the bytes do, so it is not the pass through memory. One may suspect the"
            " threads that torch divides with, several in each of the processes that share the cores; this has not"
            " been tested."
        )
    return f"{text} That does not grow as the bytes do; what it is, these rows do not tell."


def _duration(ms: float) -> str:
    return f"{fmt(ms)} ms" if abs(ms) >= 0.1 else f"{fmt(1e3 * ms)} µs"


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
        low, high = (fmt(1e3 * x) for x in (bound["host_ms"].min(), bound["host_ms"].max()))
        text = (
            f"- `{machine}`, {n} processes: at {bytes_words(least['num_bytes'])} the GPU needs"
            f" {fmt(1e3 * least['ms_p50'])} µs and the host, launching one after the other,"
            f" {fmt(1e3 * least['host_ms'])} µs. The host takes over a tenth longer than the GPU up to"
            f" {bytes_words(bound['num_bytes'].max())}"
        )
        text += f", there {low} to {high} µs a call." if len(bound) > 1 else "."
        rest = part[part["num_bytes"] > bound["num_bytes"].max()]
        less = 1e3 * (rest["ms_p50"] - rest["host_ms"]).astype(float).median()
        if len(rest) > 2 and less > 0.5:
            text += (
                f" For larger tensors a series takes less than the GPU's time above, by {fmt(less, 2)} µs a call in the"
                " median: the events between calls, which only that time contains, may cost as much."
            )
        said.append(text)
    return "\n".join(said) or f"The host's time beside the GPU's: {NOT_MEASURED}."


def ddp_words(chapter: Chapter, model: str = "xl") -> str:
    """What larger buckets gain, by the line and by what was measured."""
    total = gradient_bytes(model)
    said = []
    for ranks in measured(chapter):
        line = ranks.line
        if ranks.backend != "nccl" or line is None or ranks.world_size < 2:
            continue
        text = (
            f"- `{ranks.machine}`, {ranks.world_size} GPUs: by the line, half of the bandwidth at"
            f" {bytes_words(line.half_bytes)} and nine tenths at nine times that, {bytes_words(9 * line.half_bytes)}"
        )
        known = {s: one for s in BUCKETS if s >= 25 * MB and (one := ranks.ms(s)) is not None}
        if len(known) > 1:
            small, large = min(known), max(known)
            sums = {s: total / s * known[s] for s in (small, large)}
            gain = 1 - sums[large] / sums[small]
            best = float(ranks.best["algorithm_gb_per_s"])
            text += (
                f"; by the measured times, buckets of {bytes_words(small)} reach"
                f" {100 * small / known[small] / 1e6 / best:.0f} % of the best bandwidth, and with buckets of"
                f" {bytes_words(large)} all gradients take {fmt(sums[large])} instead of {fmt(sums[small])} ms,"
                f" {100 * abs(gain):.0f} % {'less' if gain >= 0 else 'more'}"
            )
        said.append(f"{text}.")
    return "\n".join(said) or f"The size of buckets that the latency asks for: {NOT_MEASURED}."


def correct_words(chapter: Chapter) -> str:
    """How often cases were called, and that every measured case has added up its own data."""
    rows = chapter.measured()
    if rows.empty:
        return f"Whether sums are right: {NOT_MEASURED}."
    sums, means = (rows[rows["how"] == how]["error"].astype(float) for how in ("all_reduce", "bucket"))
    least, most = int(rows["calls"].min()), int(rows["calls"].max())
    calls = f"{least}" if least == most else f"{least} to {most}: the longer they take, the fewer"
    words = (
        f"Each of the {len(rows)} cases with numbers was checked on its own data, warmed up by"
        f" {int(rows['warmups'].min())} calls and timed in {calls}."
    )
    errors = {name: float(e.max()) for name, e in (("sums", sums), ("means", means)) if len(e)}
    if set(errors.values()) == {0.0}:
        return f"{words} All {' and '.join(errors)} are exact."
    texts = [
        f"{name} {'are exact' if e == 0 else f'deviate by at most {fmt(e, 2)} of the largest element'}"
        for name, e in errors.items()
    ]
    return f"{words} The {', the '.join(texts)}."
