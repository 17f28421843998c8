"""What chapter `torch_compile` shows of every size: eager against compiled. Also what its pages share about pairs."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.torch_compile import SPEED_CONTEXT
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import steps
from cs336_systems.report.tables import EMPTY, distance, fmt, listed, percent, span
from cs336_systems.sizes import SIZES

MERE_NOISE = "no more than the same case twice"
FLAT = 1.5  # eager times a layer that differ by no more than this factor are called the same


def _pairs(chapter: Chapter, **where: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Eager and compiled row of each case of the grid of sizes, in the order of sizes."""
    rows = chapter.rows(attention="reference", repeat=0, **where)
    rows = rows[rows["context_length"] != SPEED_CONTEXT]
    keys = ["machine", "size", "context_length", "mode", "dtype"]
    eager = rows[rows["compile"] == "off"].set_index(keys)
    compiled = rows[rows["compile"] == "default"].set_index(keys)
    both = [key for key in eager.index if key in compiled.index]
    order = list(SIZES)
    both.sort(key=lambda key: (key[0], key[4], order.index(key[1]), key[3]))
    eager, compiled = (
        {tuple(row[k] for k in keys): row for row in found.reset_index().to_dict("records")}
        for found in (eager, compiled)
    )
    return [(eager[key], compiled[key]) for key in both]


def same_run(*rows: dict[str, Any]) -> bool:
    """Whether the rows were measured, in one run."""
    return all(row["status"] == "ok" for row in rows) and len({row["run"] for row in rows}) == 1


def _measured_pairs(chapter: Chapter, **where: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Those of `_pairs` that were measured, in one run."""
    return [pair for pair in _pairs(chapter, **where) if same_run(*pair)]


def pairs_apart(rows: pd.DataFrame, metric: str = "step_ms_p50") -> float:
    """How far the case that was measured twice differs from itself, as a share; 0 where there is none."""
    return max(steps.noise(rows[rows["status"] == "ok"], metric), default=0.0)


def noise(rows: pd.DataFrame, *cases: dict[str, Any], phase: str = "step") -> float:
    """What a difference between cases of a workload has to exceed: how far the case that was measured twice differs
    from itself, or the turns of one of these do. `rows`: all of the workload."""
    return max(pairs_apart(rows, f"{phase}_ms_p50"), steps.turns_apart(*cases, phase=phase))


def _apart_of(chapter: Chapter, machine: str, mode: str, phase: str = "step") -> dict[str, float]:
    """Size → how far the same case differs from itself, in the grid of sizes: the most of its training step that was
    measured twice (A/A) and of the turns of the cases of this mode."""
    rows = chapter.measured(machine=machine)
    rows = rows[rows["context_length"] != SPEED_CONTEXT]
    return {
        str(size): noise(part, *part[part["mode"] == mode].to_dict("records"), phase=phase)
        for size, part in rows.groupby("size", sort=False)
    }


def noise_words(chapter: Chapter) -> str:
    """How far the case of each workload that was measured twice differs from itself."""
    rows = chapter.measured()
    said: dict[tuple[str, int], list[str]] = {}
    for (machine, size, context, batch), part in rows.groupby(steps.SHAPE, sort=False):
        if len(steps.noise(part)):
            words = f"{percent(pairs_apart(part))} (`{size}`{f', batch {batch}' if context == SPEED_CONTEXT else ''})"
            said.setdefault((machine, context), []).append(words)
    if not said:
        return f"Pairs of the same case: {NOT_MEASURED}."
    many = len({machine for machine, _ in said}) > 1
    found = [
        f"{listed(words)} at context {context:,}{f' on `{machine}`' if many else ''}"
        for (machine, context), words in said.items()
    ]
    return (
        f"One training step of each workload was measured twice in one run (A/A). Its medians lie apart by"
        f" {'; '.join(found)}. It is one pair for all cases of a workload, mostly of the eager step. The ten steps of"
        " every case are two turns of five, with the other cases between them; their medians lie apart by up to"
        f" {percent(steps.turns_apart(*rows.to_dict('records')))}. A difference counts as none where it is no larger"
        " than its workload's pair, or than what the turns of one of its cases lie apart."
    )


def step_ms(row: dict[str, Any]) -> str:
    """A row's median step in ms, or why there is none."""
    return fmt(row["step_ms_p50"]) if row["status"] == "ok" else steps.word(row["status"])


def sizes_table(chapter: Chapter) -> pd.DataFrame:
    """Eager and compiled, the gain, the most that it could be, and what compiling costs."""
    roofs = steps.found_roofs(chapter)
    out = []
    for eager, compiled in _pairs(chapter):
        line = {
            "machine": eager["machine"], "size": eager["size"], "mode": eager["mode"], "dtype": eager["dtype"],
            "eager, ms": step_ms(eager), "compiled, ms": step_ms(compiled),
        }  # fmt: skip
        if same_run(eager, compiled):
            floor = steps.floor_ms(roofs[eager["machine"]], eager)
            gained = eager["step_ms_p50"] - compiled["step_ms_p50"]
            line |= {
                "gain": f"{fmt(eager['step_ms_p50'] / compiled['step_ms_p50'])} ×",
                "at most": EMPTY if floor is None else f"{fmt(eager['step_ms_p50'] / floor)} ×",
                "compiling, s": fmt(compiled["compile_s"]),
                "pays after, steps": f"{compiled['compile_s'] * 1e3 / gained:,.0f}" if gained > 0 else "never",
                "peak eager, GiB": fmt(eager["peak_gib"]),
                "peak compiled, GiB": fmt(compiled["peak_gib"]),
            }  # fmt: skip
        out.append(line)
    columns = [
        "machine", "size", "mode", "dtype", "eager, ms", "compiled, ms", "gain", "at most", "compiling, s",
        "pays after, steps", "peak eager, GiB", "peak compiled, GiB",
    ]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


def sizes_figure(chapter: Chapter, machine: str) -> Figure:
    """The gain of compiling over the sizes, a line for each mode; open: with the eager case measured again."""
    figure, axes = figures.panels(height=2.6)
    ax = axes[0, 0]
    gains: dict[str, dict[str, float]] = {}
    for eager, compiled in _measured_pairs(chapter, machine=machine):
        series = f"{eager['mode'].replace('_', ' ')}, {eager['dtype']}"
        gains.setdefault(series, {})[eager["size"]] = eager["step_ms_p50"] / compiled["step_ms_p50"]
    names = steps.in_order(name for of_mode in gains.values() for name in of_mode)
    if not names:
        figures.nothing(ax)
    for place, (series, of_mode) in enumerate(sorted(gains.items())):
        label, color, marker = figures.look(series, place)
        there = [name for name in names if name in of_mode]
        ax.plot(
            [names.index(n) for n in there],
            [of_mode[n] for n in there],
            marker=marker,
            color=color,
            label=label,
        )
        again = _gains_again(chapter, machine, series.split(",")[0].replace(" ", "_"))
        there = [name for name in names if name in again]
        places = [names.index(n) for n in there]
        ax.plot(places, [again[n] for n in there], ls="", marker=marker, color=color, mfc="none")
    if names:
        ax.axhline(1, color="#6b6b6b", lw=0.8)
        ax.set_xticks(range(len(names)), names)
        ax.legend()
    ax.set(ylabel="eager / compiled, time")
    return figure


def graphs_words(chapter: Chapter) -> str:
    """That the compiled code is what ran: one graph for each case, and nothing compiled again while it was timed."""
    rows = chapter.measured()
    compiled = rows[rows["compile"] != "off"]
    if compiled.empty:
        return f"Compiled steps: {NOT_MEASURED}."
    graphs = sorted({int(g) for g in compiled["graphs"]})
    words = (
        f"In each of the {len(compiled)} compiled cases Dynamo made {' or '.join(map(str, graphs))} graph"
        f"{'s' * (graphs != [1])}, and a recompilation during the timed steps would have been an error."
    )
    replayed = compiled[compiled["compile"] == "reduce-overhead"]
    if len(replayed):
        skipped = int((replayed["cuda_graph_skips"] > 0).sum())
        words += f" CUDA graphs were used in {len(replayed) - skipped} of the {len(replayed)} cases that asked for it."
    return words


def _gains(chapter: Chapter, machine: str, mode: str) -> dict[str, float]:
    """Size → eager time over compiled time, smallest size first."""
    pairs = _measured_pairs(chapter, machine=machine, mode=mode)
    found = {e["size"]: e["step_ms_p50"] / c["step_ms_p50"] for e, c in pairs}
    return {name: found[name] for name in steps.in_order(found)}


def sizes_words(chapter: Chapter) -> str:
    """The range of the gain for forward and for the step, how it goes with size, and whether the predictions held."""
    said = []
    for machine in chapter.machines:
        aparts = {mode: _apart_of(chapter, machine, mode) for mode in ("forward", "train_step")}
        both = {mode: _gains(chapter, machine, mode) for mode in aparts}
        for mode, found in both.items():
            if found:
                large, small = min(found, key=found.get), max(found, key=found.get)
                said.append(
                    f"- `{machine}`, {mode.replace('_', ' ')}: compiling gains between {fmt(found[large])} ×"
                    f" (`{large}`) and {fmt(found[small])} × (`{small}`).{_with_size(found, aparts[mode])}"
                    f"{_again(chapter, machine, mode)}"
                )
        shared = [name for name in both["forward"] if name in both["train_step"]]
        if shared:
            ratios = {name: both["forward"][name] / both["train_step"][name] for name in shared}
            even = [
                name
                for name in shared
                if distance(ratios[name]) <= max(apart.get(name, 0.0) for apart in aparts.values())
            ]
            less = [name for name in shared if name not in even and ratios[name] < 1]
            more = len(shared) - len(even) - len(less)
            said.append(
                f"- `{machine}`: forward alone gains more than the whole step at {more} of {len(shared)} sizes"
                + (f", less at {_names(less)}" if less else "")
                + (f"; at {_names(even)} they differ by {MERE_NOISE}" if even else "")
                + "."
            )
    return "\n".join(said) or f"What compiling gains: {NOT_MEASURED}."


def _names(sizes: list[str]) -> str:
    return listed([f"`{name}`" for name in sizes])


def _with_size(found: dict[str, float], apart: dict[str, float]) -> str:
    """How the gain goes from the smallest size to the largest, and from each to the next, beyond the noise."""
    names = list(found)
    if len(names) < 2:
        return ""

    def goes(a: str, b: str) -> str:
        ratio = found[b] / found[a]
        if distance(ratio) <= max(apart.get(a, 0.0), apart.get(b, 0.0)):
            return "even"
        return "rises" if ratio > 1 else "falls"

    whole = {
        "falls": "falls, as predicted",
        "rises": "rises, against the prediction",
        "even": f"changes by {MERE_NOISE}, where it was predicted to fall",
    }
    text = f" From `{names[0]}` to `{names[-1]}` it {whole[goes(names[0], names[-1])]}"
    if len(names) == 2:
        return f"{text}."
    steps_of: dict[str, list[str]] = {}
    for a, b in itertools.pairwise(names):
        steps_of.setdefault(goes(a, b), []).append(f"`{a}` to `{b}`")
    if set(steps_of) == {"falls"}:
        return f"{text}, at every size on the way."
    words = [f"{word} from {listed(steps_of[word])}" for word in ("falls", "rises") if word in steps_of]
    if "even" in steps_of:
        words.append(f"changes by {MERE_NOISE} from {listed(steps_of['even'])}")
    return f"{text}; on the way it {listed(words)}."


def _gains_again(chapter: Chapter, machine: str, mode: str) -> dict[str, float]:
    """Size → the second measurement of the eager case over the compiled one, as far as there is one."""
    rows = chapter.measured(machine=machine, mode=mode, attention="reference", compile="off", repeat=1)
    pairs = {e["size"]: c for e, c in _measured_pairs(chapter, machine=machine, mode=mode)}
    found = {}
    for name in steps.in_order(pairs):
        again = rows[(rows["run"] == pairs[name]["run"]) & (rows["size"] == name)]
        if len(again):
            found[name] = float(again.iloc[0]["step_ms_p50"]) / pairs[name]["step_ms_p50"]
    return found


def _again(chapter: Chapter, machine: str, mode: str) -> str:
    """The gains over the second measurement of the eager case; nothing where there is none."""
    said = [f"{fmt(gain)} (`{name}`)" for name, gain in _gains_again(chapter, machine, mode).items()]
    return f" With the second measurement of the eager step: {listed(said)}." if said else ""


def host_words(chapter: Chapter) -> str:
    """Eager and compiled time for each layer, by size, beside the FLOPs of one; and what follows from an eager time
    that does not grow with them."""
    said = []
    for machine in chapter.machines:
        for mode in ("forward", "train_step"):
            pairs = {e["size"]: (e, c) for e, c in _measured_pairs(chapter, machine=machine, mode=mode)}
            names = steps.in_order(pairs)
            if len(names) < 2:
                continue
            layers = {name: SIZES[name].num_layers for name in names}
            eager, compiled = (
                [pairs[name][place]["step_ms_p50"] / layers[name] for name in names] for place in (0, 1)
            )
            flops = [steps.flops(pairs[name][0]) / layers[name] for name in names]
            growth = [f / flops[0] for f in flops]
            words = (
                f"- `{machine}`, {mode.replace('_', ' ')}: divided by its layers, the time is"
                f" {listed([fmt(ms) for ms in eager])} ms eager and {listed([fmt(ms) for ms in compiled])} ms compiled"
                f" ({_names(names)}), the FLOPs"
                f" {listed([fmt(g, 2) for g in growth[1:]])} times those of `{names[0]}`."
            )
            same = [
                place
                for place in range(len(names))
                if max(eager[: place + 1]) <= FLAT * min(eager[: place + 1])
            ]
            last = same[-1]
            if growth[last] > 2 * FLAT:
                words += (
                    f" Up to `{names[last]}` the eager time of a layer stays within a factor of"
                    f" {fmt(max(eager[: last + 1]) / min(eager[: last + 1]), 2)}, while its FLOPs grow"
                    f" {fmt(growth[last], 2)}-fold: so in the smaller ones it is mostly what the host needs, not the"
                    " kernels, and a compiled step is shorter there because the host needs less."
                )
            said.append(words)
    return "\n".join(said)


def memory_words(chapter: Chapter) -> str:
    """What share of the eager peak the compiled one is."""
    said = []
    for machine in chapter.machines:
        for mode in ("forward", "train_step"):
            pairs = _measured_pairs(chapter, machine=machine, mode=mode)
            shares = [c["peak_gib"] / e["peak_gib"] for e, c in pairs]
            if shares:
                said.append(
                    f"{span(shares, show=percent)} of the eager one ({mode.replace('_', ' ')}, `{machine}`)"
                )
    return f"The compiled peak is {listed(said)}." if said else ""


def optimizer_words(chapter: Chapter) -> str:
    """How long the update takes after a compiled pass, beside the same code after an eager one; it was predicted to
    take as long."""
    said = []
    for machine in chapter.machines:
        pairs = _measured_pairs(chapter, machine=machine, mode="train_step")
        shares = {c["size"]: c["optimizer_ms_p50"] / e["optimizer_ms_p50"] for e, c in pairs}
        if not shares:
            continue
        apart = _apart_of(chapter, machine, "train_step", "optimizer")
        less, more = (
            [n for n in shares if (shares[n] < 1) == shorter and distance(shares[n]) > apart.get(n, 0.0)]
            for shorter in (True, False)
        )
        words = (
            f"AdamW, the same code in both, takes {span(shares.values())} × as long after a compiled pass as after an"
            f" eager one (`{machine}`)"
        )
        if not less + more:
            said.append(f"{words}: as predicted, it gains nothing beyond its own noise.")
            continue
        counts = [f"{word} at {len(of)}" for word, of in (("shorter", less), ("longer", more)) if of]
        said.append(
            f"{words}, by more than its own noise {listed(counts)} of {len(shares)} sizes. It was predicted to gain"
            " nothing: that missed. In both it begins on an idle device; why it differs, these rows do not show."
        )
    return " ".join(said)
