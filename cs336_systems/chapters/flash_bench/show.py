"""What chapter `flash_bench` shows: numeric frames and figures from its rows."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cs336_systems import accounting
from cs336_systems.chapters.flash_bench.measure import LANGUAGES_TOKENS, PARTS
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.report import figures, tables
from cs336_systems.store.provenance import PACKAGE, without_comments

OURS = "flash_triton"
PASSES = dict(zip(PARTS, ("F", "B", "F+B"), strict=True))
SHORT = {"flash_triton": "ours", "flash_torch": "tiled", "reference": "plain", "reference_compiled": "compiled",
         "sdpa": "SDPA", "sdpa_flash": "SDPA flash", "sdpa_cudnn": "cuDNN", "flex_compiled": "Flex",
         "flash_cuda": "CUDA C++", "plain_triton": "Triton"}  # fmt: skip
BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
SHAPE = ["machine", "heads", "dtype", "head_dim", "seq_len"]
KERNEL_TOKENS = 8192  # up to here every call is short enough for a CUDA graph: speedups of kernel times
# language → its implementation in 16 bits; the files of its kernels, and of what compiles and launches them
LANGUAGES = {
    "PyTorch": ("flash_torch", ("flash_torch.py",), ()),
    "Triton": ("plain_triton", ("triton/kernels.py", "triton/backward.py"),
               ("triton/again.py", "triton/launch.py", "triton/tiles.py")),
    "Gluon": ("flash_triton", ("hopper/*ward*.py", "hopper/common.py"),
              ("hopper/configs.py", "hopper/launch.py", "hopper/tma.py", "triton/again.py", "triton/launch.py")),
    "CUDA C++": ("flash_cuda", ("cuda/*.cu", "cuda/*.cuh"), ("cuda/*.py",)),
}  # fmt: skip
_QUERY, _KEY, _SEEN = "#0072B2", "#D55E00", "#dce6ef"  # colors of the drawing


def first_machine(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first machine, each case once: what a figure shows."""
    return tables.first_machine(rows[rows["repeat"] == 0])


def kernel_ms(rows: pd.DataFrame) -> pd.Series:
    """Kernel time of forward and backward together; NaN where a pass is too long for a CUDA graph."""
    return (rows["forward_gpu_ms"] + rows["backward_gpu_ms"]).astype(float)


# ------------------------------------------------------------------------------------------------ tables
def times(
    rows: pd.DataFrame, impls: tuple[str, ...] = (), index: tuple[str, ...] = tuple(SHAPE)
) -> pd.DataFrame:
    """The handout's table: median wall time in ms, a line for each shape, a column for each pass and implementation
    (all that the rows have, if none are named)."""
    rows = rows[(rows["repeat"] == 0) & rows["impl"].isin(impls or list(rows["impl"]))]
    names = rows["impl"].map(lambda impl: SHORT.get(impl, impl))
    heads = {f"{part}_ms_p50": f"{short} " + names for part, short in PASSES.items()}
    return tables.spread(rows, index, heads).rename(columns={"head_dim": "d", "seq_len": "n"})


def of_lengths(rows: pd.DataFrame, lengths: tuple[int, ...]) -> pd.DataFrame:
    """The rows of these lengths; all rows of a small grid that has none of them."""
    found = rows[rows["seq_len"].isin(lengths)]
    return found if len(found) else rows


def floors(rows: pd.DataFrame, roof: Roofs) -> pd.DataFrame:
    """Ours by pass and shape: the least times in µs that GEMMs (at the best rate measured), exponentials (at the clock
    seen) and memory traffic (at the best copy measured) imply, the kernel time, and the longest of the three in
    percent of it (NaN where one is not known)."""
    out = []
    for part in ("forward", "backward"):
        for row in first_machine(rows[rows["impl"] == OURS]).itertuples():
            n, d, heads = row.seq_len, row.head_dim, row.heads
            flops = accounting.attention_flops(heads, n, n, d, True, part)
            moved = accounting.attention_bytes(heads, n, n, d, BYTES[row.dtype], part)
            exps = accounting.attention_exps(heads, n, n, True, part)
            clocked = roof.sms and row.sm_mhz > 0
            exps_ms = accounting.exps_ms(exps, roof.sms, row.sm_mhz) if clocked else math.nan
            times = roof.gemm_ms(flops, row.dtype), exps_ms, roof.copy_ms(moved)
            *least, kernel = (1e3 * ms for ms in (*times, getattr(row, f"{part}_gpu_ms")))
            floor = 100 * pd.Series(least).max(skipna=False) / kernel
            out.append([part, heads, n, *least, kernel, floor])
    parts = ["GEMMs, µs", "exponentials, µs", "memory, µs"]
    return pd.DataFrame(out, columns=["pass", "heads", "n", *parts, "kernel time, µs", "floor, %"])


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of all but ours, each once, with `speedup`: its time of both passes over that of ours in the same run;
    kernel time up to KERNEL_TOKENS, wall time beyond."""
    rows = rows[rows["repeat"] == 0]
    wall = rows["end_to_end_ms_p50"].astype(float)
    rows = rows.assign(ms=kernel_ms(rows).where(rows["seq_len"] <= KERNEL_TOKENS, wall))
    ours, others = (rows[(rows["impl"] == OURS) == own].reset_index(drop=True) for own in (True, False))
    return others.assign(speedup=others["ms"] / tables.looked_up(ours, "ms", others, [*SHAPE, "run"]))


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """The largest error against fp64 of the output (O) and the gradients (grads) over all shapes, a line for each
    dtype, a column for each implementation."""
    rows = tables.chosen(rows, repeat=0, status="ok")
    heads = {"error_out": "O", "error_grads": "grads"}
    keys, impls = ["machine", "dtype"], rows["impl"].unique()
    numbers = rows.astype(dict.fromkeys(heads, float))
    worst = numbers.groupby([*keys, "impl"])[list(heads)].max().unstack("impl")
    worst = worst[[(metric, impl) for metric in heads for impl in impls]]
    worst.columns = [f"{heads[metric]} {SHORT.get(impl, impl)}" for metric, impl in worst.columns]
    out = rows[keys].drop_duplicates(ignore_index=True).merge(worst.reset_index(), on=keys)
    return out.assign(dtype=out["dtype"].map(figures.label))


def code_lines(file: Path) -> int:
    """The lines of a file that are neither blank nor comment nor docstring."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return sum(bool(line.strip()) for line in without_comments(text).splitlines())
    strings = [
        x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
    ]
    told = {n for x in strings for n in range(x.lineno, x.end_lineno + 1)}
    lines = ((n, line.strip()) for n, line in enumerate(text.splitlines(), 1))
    return sum(bool(line) and line[0] != "#" and n not in told for n, line in lines)


def languages(rows: pd.DataFrame) -> pd.DataFrame:
    """Lines of code of our implementation in each language, of its kernels and of what launches them, and its median
    wall time of each pass in ms at LANGUAGES_TOKENS tokens, by head dimension."""
    rows = first_machine(rows[rows["seq_len"] == LANGUAGES_TOKENS])
    folder, out = PACKAGE / "attention", []
    for language, (impl, *parts) in LANGUAGES.items():
        counts = [sum(code_lines(f) for glob in globs for f in folder.glob(glob)) for globs in parts]
        ms = rows[rows["impl"] == impl].set_index("head_dim")
        times = {
            f"{PASSES[p]} d = {d}, ms": ms[f"{p}_ms_p50"].get(d, math.nan)
            for p in PARTS[:2]
            for d in (64, 128)
        }
        out.append({"language": language, "lines: kernels": counts[0], "launching": counts[1]} | times)
    return pd.DataFrame(out)


def least_ms(gpu: str, heads: int, n: int, d: int, part: str) -> float:
    """Least time of a causal pass in fp16 by a GPU's data sheet."""
    flops = accounting.attention_flops(heads, n, n, d, True, part)
    moved = accounting.attention_bytes(heads, n, n, d, BYTES["fp16"], part)
    return accounting.peaks(gpu).roofline_ms(flops, moved, "fp16")


# ------------------------------------------------------------------------------------------------ figures
def tiling_figure() -> Figure:
    """Left: the causal scores in tiles, the row that a program of the forward pass walks and the column of one of the
    backward pass. Right: where a forward program keeps what. A drawing: no numbers."""
    tiles, row, column = 7, 4, 2
    figure, axes = figures.panels(columns=2, height=2.9, gridspec_kw={"width_ratios": [1, 1.1]})
    left, right = axes[0]
    for i in range(tiles):
        for j in range(tiles):
            skipped = {"fc": "white", "ec": "#bbbbbb", "ls": ":"}
            seen = {"fc": _SEEN, "ec": "#777777", "hatch": "////" if i == j else ""}
            left.add_patch(Rectangle((j, i), 1, 1, lw=0.7, **(skipped if j > i else seen)))
    left.add_patch(Rectangle((0, row), row + 1, 1, fill=False, ec=_QUERY, lw=2.4, zorder=3))
    walked = Rectangle((column, column), 1, tiles - column, fill=False, ec=_KEY, lw=2.4, ls="--", zorder=3)
    left.add_patch(walked)
    _arrow(left, (0.1, row + 0.5), (row + 0.9, row + 0.5), _QUERY)
    _arrow(left, (column + 0.5, column + 0.1), (column + 0.5, tiles - 0.1), _KEY)
    _box(left, (-1.3, row), 1.1, 1, "$Q_i$", _QUERY)
    _box(left, (column - 0.3, -1.3), 1.6, 1.1, "$K_j, V_j$", _KEY)
    white = {"fc": "white", "ec": "none", "pad": 0.5}
    for x, y, text, color in (
        (3.2, 0.5, "skipped: never loaded", "#222222"),
        (row + 1.15, row + 0.5, "forward program:\nwalks over keys", _QUERY),
        (column - 1.2, tiles + 0.5, "backward program: walks over queries", _KEY),
    ):
        left.text(x, y, text, color=color, va="center", fontsize=8, bbox=white)
    left.set(xlim=(-1.5, tiles + 1.6), ylim=(tiles + 0.9, -1.4), aspect="equal")

    _box(right, (0, 3.3), 10, 6.7, "", "white", ec="#777777", ls="--")
    right.text(0.3, 9.5, "on the chip: one program of the forward pass", va="center", fontsize=8)
    registers = r"registers, fp32:  $S_{ij}$, $\tilde P_{ij}$;  $m$, $\ell$, $\tilde O_i$"
    _box(right, (0.4, 6.6), 9.2, 2.4, registers, _SEEN)
    _box(right, (0.4, 3.6), 9.2, 1.8, "shared memory:  $K_j, V_j$", _SEEN)
    _box(right, (0, 0), 10, 1.7, "GPU memory:  $Q, K, V, O$ and $L$; no scores", "#f4f4f4", ec="#777777")
    for x, start, end, y, text in (
        (1.0, 1.7, 6.6, 2.5, "$Q_i$\nonce"), (3.9, 1.7, 3.6, 2.5, "$K_j, V_j$\neach step"),
        (3.9, 5.4, 6.6, 6.0, "two GEMMs"), (7.9, 6.6, 1.7, 2.5, "$O_i, L_i$\nonce"),
    ):  # fmt: skip
        _arrow(right, (x, start), (x, end), "#222222")
        right.text(x + 0.2, y, text, va="center", fontsize=8)
    right.set(xlim=(-0.2, 10.2), ylim=(-0.2, 10.2))
    for ax in (left, right):
        ax.axis("off")
    return figure


def _box(
    ax: Axes, corner: tuple[float, float], width: float, height: float, text: str, fc: str, **more: str
) -> None:
    ax.add_patch(Rectangle(corner, width, height, fc=fc, lw=1, **({"ec": "none"} | more)))
    color = "white" if fc in (_QUERY, _KEY) else "#222222"
    center = corner[0] + width / 2, corner[1] + height / 2
    ax.text(*center, text, ha="center", va="center", color=color, fontsize=8.5)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.5}, zorder=4)


def speedup_figure(rows: pd.DataFrame, peers: tuple[str, ...], dtypes: tuple[str, ...]) -> Figure:
    """A map for each peer (down) and dtype (across): speedup of ours, length across, head dimension down."""
    found = speedups(first_machine(rows))
    figure, axes = figures.panels(columns=len(dtypes), rows=len(peers), height=1.15)
    for line, peer in zip(axes, peers, strict=True):
        for ax, dtype in zip(line, dtypes, strict=True):
            ax.set_title(f"over {figures.label(peer)}, {figures.label(dtype)}")
            shown = tables.chosen(found, impl=peer, dtype=dtype)
            if shown.empty:
                figures.nothing(ax)
                continue
            table = tables.pivot(shown, ("head_dim",), "seq_len", "speedup")
            figures.heat(ax, table.set_index("head_dim"), words=pd.DataFrame(table.attrs["words"]))
            for text in ax.texts:
                text.set_fontsize(8)
            ax.set_ylabel("d")
    return figure


def kernel_figure(rows: pd.DataFrame, dtypes: tuple[str, ...]) -> Figure:
    """Kernel time of both passes over the length, a panel for each dtype; dashed, the wall time of ours."""
    rows = first_machine(rows)
    rows = rows.assign(kernel=kernel_ms(rows))
    figure, axes = figures.panels(columns=len(dtypes), height=2.7, sharey=True)
    for ax, dtype in zip(axes[0], dtypes, strict=True):
        shown = rows[rows["dtype"] == dtype]
        figures.lines(ax, shown, "seq_len", "kernel", "impl", log_y=True)
        ours = shown[(shown["impl"] == OURS) & shown["end_to_end_ms_p50"].notna() & shown["kernel"].notna()]
        wall = ours["seq_len"], ours["end_to_end_ms_p50"]
        ax.plot(*wall, color=figures.ROOF, ls="--", label="wall time of ours")
        ax.set(title=figures.label(dtype), xlabel="sequence length")
    axes[0, 0].set_ylabel("ms, forward + backward")
    figures.legend_below(figure, *axes[0])
    return figure


def rate_figure(rows: pd.DataFrame, roof: Roofs) -> Figure:
    """TFLOP/s of both passes in bf16 by kernel time over the length, a panel for each head dimension, below the best
    GEMM."""
    rows = first_machine(rows)
    flops = [accounting.attention_flops(h, n, n, d, True, "end_to_end")
             for h, n, d in zip(rows["heads"], rows["seq_len"], rows["head_dim"], strict=True)]  # fmt: skip
    rows = rows.assign(rate=pd.Series(flops, index=rows.index, dtype=float) / kernel_ms(rows) / 1e9)
    dims = sorted(rows["head_dim"].unique()) or [math.nan]
    figure, axes = figures.panels(columns=len(dims), height=2.7, sharey=True)
    for ax, d in zip(axes[0], dims, strict=True):
        figures.lines(ax, rows[rows["head_dim"] == d], "seq_len", "rate", "impl")
        figures.roof(ax, roof.tflops.get("bf16"), "best GEMM measured")
        ax.set(title=f"d = {d}", xlabel="sequence length")
    axes[0, 0].set_ylabel("TFLOP/s, forward + backward")
    figures.legend_below(figure, *axes[0])
    return figure
