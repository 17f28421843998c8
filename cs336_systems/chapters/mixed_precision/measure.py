"""Chapter `mixed_precision`: what 16 bits do to a sum, to a small model's tensors, to layer norm, and to a step's time.

    papermill book/mixed_precision.ipynb out.ipynb -p kind step -p size small,medium

Four kinds of rows; the first three take a second on any machine:

accumulation  A hundredth, added a thousand times: accumulator `dtype`, addend `what` ("fp16", or "fp16 as fp32":
              rounded to fp16, then cast up).
dtypes        A toy model under autocast of `dtype`: the dtype of the tensor `what`, seen by hooks.
layer_norm    Layer norm over `width` numbers of standard deviation `scale` and mean `offset`, whose part `what` is
              computed in `dtype`, against fp64.
step          One step of a model, as in `shared.steps`: every size at context 512 in fp32, TF32 and bf16, taking
              turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems import accounting
from cs336_systems.chapters.shared import depends, steps
from cs336_systems.measure.device import default_device, torch_dtype
from cs336_systems.sizes import HANDOUT_SIZES
from cs336_systems.store.status import failure_is_a_row
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    import torch

ADDITIONS, ADDEND = 1000, "0.01"
KEPT = 50  # every so many additions the sum is kept
SUMS = (
    ("fp32", "fp32"), ("fp16", "fp16"), ("fp32", "fp16"), ("fp32", "fp16 as fp32"),  # the handout's
    ("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "bf16 as fp32"),
)  # fmt: skip
"""(accumulator, addend)"""

AUTOCAST = ("fp16", "bf16")
PARAMETERS = ("fc1.weight", "ln.weight", "ln.bias", "fc2.weight")
TENSORS = (
    "input", *PARAMETERS,  # inside the autocast context
    "fc1 operand",  # the weight as the first matmul reads it
    "fc1", "relu", "ln statistics", "ln", "fc2", "loss",  # outputs; the statistics: the norm's mean and 1/sigma
    "fc2 grad", "ln grad", "relu grad", "fc1 grad",  # of these outputs
    *(f"{name}.grad" for name in PARAMETERS),
)  # fmt: skip

NORM_DTYPES = ("fp16", "bf16", "fp32")
PARTS = {
    "ends": "only input and output are rounded",
    "mean": "the mean: sum and division",
    "variance": "the variance: differences, squares, their sum by halves",
    "running": "the variance, its squares added up one after the other",
    "one_pass": "the variance as E[x²] − E[x]²",
    "normalize": "the result: difference times reciprocal root",
    "all": "everything",
    "fp32_inside": "input and output are rounded, all between in fp32",
}
"""What of layer norm is computed in the low precision; everything else is fp64."""
NORM_ROWS, NORM_WIDTH, EPS = 64, 1024, 1e-5
SCALES = (1e-4, 3e-4, 1e-3, 1e-2, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 1e4)
OFFSETS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
WIDTHS = (64, 256, 4096, 16384)  # powers of two, so that halves are whole

CONTEXT = 512
METRICS = (
    "result",  # the last sum, exactly
    "result_error",  # its difference to 10
    "sums",  # the sum after every 50th addition, as one text
    "observed",  # the dtype of a tensor
    "output_error",  # of layer norm, relative (Frobenius norm over all rows); empty where it is not finite
    "mean_error",  # root mean square over the rows, in units of sigma
    "variance_error",  # relative, in the same sense
    "not_finite",  # the share of rows whose mean, variance or output is infinite or not a number
    *steps.METRICS,
)
DEPENDS = depends.STEPS
GROUP = ("kind", *steps.GROUP)
_STEP_FIELDS = tuple(field.name for field in dataclasses.fields(steps.Case))


@dataclass(frozen=True)
class Case:
    """One measurement. `kind` says which of the fields have a meaning; the others are empty.

    dtype: of the accumulator, of autocast, of a part of layer norm, of a step. what: the addend, the tensor, the part
    of layer norm. scale, offset, width: of layer norm's input. The rest: of a step, as in `steps.Case`.
    """

    kind: str
    dtype: str
    what: str = ""
    scale: float = 0.0
    offset: float = 0.0
    width: int = 0
    size: str = ""
    context_length: int = 0
    mode: str = ""
    attention: str = ""
    compile: str = ""
    batch: int = 0
    warmup: int = 0
    steps: int = 0
    model: str = ""
    repeat: int = 0

    @property
    def step(self) -> steps.Case:
        """The same as a case of `shared.steps`."""
        return steps.Case(**{name: getattr(self, name) for name in _STEP_FIELDS})


def grid(preset: str) -> list[Case]:
    """The small kinds, and the steps of every size, or of the tiny model in fp32 and bf16 on a CPU."""
    small = [
        *(Case("accumulation", dtype, what) for dtype, what in SUMS),
        *(Case("dtypes", dtype, what) for dtype in AUTOCAST for what in TENSORS),
        *(
            Case("layer_norm", dtype, part, scale, offset, width)
            for scale, offset, width in _norm_inputs()
            for dtype in NORM_DTYPES
            for part in PARTS
        ),
    ]
    if preset == "smoke":
        return [*small, *_steps("tiny", 64, ("fp32", "bf16"), batch=1, steps=4)]  # bf16 is slow on most CPUs
    return [*small, *(case for size in HANDOUT_SIZES for case in _steps(size, CONTEXT, steps.DTYPES))]


def _norm_inputs() -> list[tuple[float, float, int]]:
    """(scale, offset, width): one of them is varied at a time."""
    return [
        *((scale, 0.0, NORM_WIDTH) for scale in SCALES),
        *((1.0, offset, NORM_WIDTH) for offset in OFFSETS),
        *((1.0, 0.0, width) for width in WIDTHS),
    ]


def _steps(size: str, context_length: int, dtypes: Sequence[str], **fields: int) -> list[Case]:
    """All modes and dtypes of a size, and one of them twice (A/A). fields: other batch and steps."""
    kinds = [(mode, dtype, 0) for dtype in dtypes for mode in accounting.MODES]
    kinds.append(("forward_backward", dtypes[-1], 1))
    found = [
        steps.Case(size, context_length, mode, dtype, repeat=repeat, **fields)
        for mode, dtype, repeat in kinds
    ]
    return [Case(kind="step", **dataclasses.asdict(case)) for case in found]


def run_group(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """The metrics of the cases of one kind (and, of steps, one size)."""
    kind = cases[0].kind
    if kind == "step":
        yield from steps.run_group([case.step for case in cases])
        return
    import torch

    device = default_device()
    measure: dict[str, Callable[[Case, str], dict[str, Any]]] = {
        "accumulation": _accumulation, "dtypes": _dtypes, "layer_norm": _layer_norm,
    }  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a CPU's threads would wait for each other longer than these small tensors take
    try:
        for case in cases:
            metrics: dict[str, Any] = {}
            with failure_is_a_row(metrics):
                metrics |= measure[kind](case, device)
            yield metrics
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------ accumulation
def _accumulation(case: Case, device: str) -> dict[str, Any]:
    """Adds tensors without axes one by one, in place, as the handout does."""
    import torch

    stored, _, cast = case.what.partition(" as ")
    total = torch.tensor(0.0, dtype=torch_dtype(case.dtype), device=device)
    addend = torch.tensor(float(ADDEND), dtype=torch_dtype(stored), device=device)
    sums = []
    for number in range(1, ADDITIONS + 1):
        total += addend.to(torch_dtype(cast)) if cast else addend
        if number % KEPT == 0:
            sums.append(total.item())
    # as text, because a CSV's numbers have six digits
    texts = [repr(x) for x in sums]
    return {
        "result": texts[-1],
        "result_error": sums[-1] - ADDITIONS * float(ADDEND),
        "sums": " ".join(texts),
    }


# ------------------------------------------------------------------------------------------------ dtypes
def _dtypes(case: Case, device: str) -> dict[str, Any]:
    return {"observed": observe(case.dtype, device)[case.what]}


def observe(dtype: str, device: str) -> dict[str, str]:
    """The dtypes of the tensors of a forward and a backward pass of the toy model under autocast, by TENSORS' names.

    Modules' hooks see outputs, tensors' hooks see their gradients, and a dispatch mode below autocast sees what the
    operators really get and give.
    """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[str, torch.dtype] = {}

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            output = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default:
                seen.setdefault("fc1 operand", args[1].dtype)  # the first matmul's; later ones change nothing
            elif function is torch.ops.aten.native_layer_norm.default:
                seen["ln statistics"] = output[1].dtype
            return output

    def see(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            seen[name] = output.dtype
            output.register_hook(lambda grad: seen.__setitem__(f"{name} grad", grad.dtype))

        return hook

    toy = nn.Sequential()
    toy.add_module("fc1", nn.Linear(16, 10, bias=False))
    toy.add_module("relu", nn.ReLU())
    toy.add_module("ln", nn.LayerNorm(10))
    toy.add_module("fc2", nn.Linear(10, 5, bias=False))
    toy.to(device)
    for name, module in toy.named_children():
        module.register_forward_hook(see(name))
    x = torch.randn(8, 16, device=device)
    targets = torch.arange(8, device=device) % 5
    with torch.autocast(device, torch_dtype(dtype)), Operators():
        seen["input"] = x.dtype
        seen |= {name: parameter.dtype for name, parameter in toy.named_parameters()}
        loss = F.cross_entropy(toy(x), targets)
    seen["loss"] = loss.dtype
    loss.backward()
    seen |= {f"{name}.grad": parameter.grad.dtype for name, parameter in toy.named_parameters()}
    names = {torch_dtype(name): name for name in ("fp16", "bf16", "fp32", "fp64")}
    return {name: names[found] for name, found in seen.items()}


# ------------------------------------------------------------------------------------------------ layer norm
def _layer_norm(case: Case, device: str) -> dict[str, Any]:
    """Errors of layer norm (without weight and bias) with one part in the case's dtype.

    For "ends", "all" and "fp32_inside" the truth is fp64 of the input before it was rounded; for the single parts it is
    fp64 of the rounded input, so that the error is the part's alone.
    """
    import torch

    low, part = torch_dtype(case.dtype), case.what
    generator = torch.Generator().manual_seed(case.width)  # on the CPU: the same numbers on every device
    normal = torch.randn(NORM_ROWS, case.width, dtype=torch.float64, generator=generator)
    exact = (case.scale * normal + case.offset).to(device)
    x = exact.to(low).double()
    whole = part in ("ends", "all", "fp32_inside")
    truth = _norm(exact if whole else x)
    inside = {"all": low, "fp32_inside": torch.float32}.get(part, torch.float64)
    found = _norm(
        x,
        mean_in=low if part == "mean" else inside,
        variance_in=low if part in ("variance", "running", "one_pass") else inside,
        normalize_in=low if part == "normalize" else inside,
        variance="halves" if part not in ("running", "one_pass") else part,
    )
    if whole:
        found = (*found[:2], found[2].to(low).double())
    finite = torch.ones(NORM_ROWS, 1, dtype=torch.bool, device=device)
    for tensor in found:
        finite &= tensor.isfinite().all(-1, keepdim=True)
    mean, variance, output = ((a - b).norm() for a, b in zip(found, truth, strict=True))
    errors = {
        "output_error": output / truth[2].norm(),
        "mean_error": mean / truth[1].sum().sqrt(),
        "variance_error": variance / truth[1].norm(),
    }
    numbers = {name: error.item() for name, error in errors.items()}
    return {name: e for name, e in numbers.items() if e == e and e != float("inf")} | {
        "not_finite": 1 - finite.double().mean().item()
    }


def _norm(
    x: torch.Tensor, mean_in: torch.dtype | None = None, variance_in: torch.dtype | None = None,
    normalize_in: torch.dtype | None = None, variance: str = "halves",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Mean (rows, 1), variance (rows, 1) and output (rows, width) of x (rows, width; fp64), as fp64.

    Each operation of a part rounds its result to the part's dtype (fp64 where none is given).
    """
    import torch

    mean_in, variance_in, normalize_in = (d or torch.float64 for d in (mean_in, variance_in, normalize_in))
    mean = _mean(x.to(mean_in)).double()
    y = x.to(variance_in)
    if variance == "one_pass":
        average = _mean(y)
        spread = _mean(y * y) - average * average
    else:
        centered = y - mean.to(variance_in)
        spread = _mean(centered * centered, running=variance == "running")
    y = x.to(normalize_in)
    output = (y - mean.to(normalize_in)) * torch.rsqrt(spread.to(normalize_in) + EPS)
    return mean, spread.double(), output.double()


def _mean(x: torch.Tensor, running: bool = False) -> torch.Tensor:
    """The mean of the last axis (kept), each partial sum rounded to x's dtype: torch.sum would add up in fp32.

    By halves, as the threads of a block do it (the width a power of two), or one after the other.
    """
    width = x.shape[-1]
    if running:
        total = x[..., :1].clone()
        for column in x[..., 1:].T.contiguous():
            total += column[:, None]
        return total / width
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x / width


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
