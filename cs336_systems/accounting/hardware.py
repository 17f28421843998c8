"""Data-sheet peaks of known GPUs, and the least times (roofline) that follow from them.

TFLOP/s and TB/s are powers of ten.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from cs336_systems.accounting.operations import check_sizes


def roofline_ms(flops: float, num_bytes: float, tflops: float, tb_per_s: float) -> float:
    """The least time in ms for this much work: compute at `tflops` or memory traffic at `tb_per_s`. NaN if one of these
    is, since `max` may drop it."""
    check_sizes(tflops=tflops, tb_per_s=tb_per_s)
    compute, memory = flops / (tflops * 1e9), num_bytes / (tb_per_s * 1e9)
    return math.nan if math.isnan(compute + memory) else max(compute, memory)


def exps_ms(exps: float, sms: int, sm_mhz: float, per_clock: int = 16) -> float:
    """The least time in ms for this many exponentials on the special function units.

    16 results per clock and multiprocessor is what the CUDA programming guide's table of arithmetic throughput
    gives for compute capabilities 7.x to 9.0. Kernels that compute some of them as polynomials can be faster.
    """
    check_sizes(sms=sms, sm_mhz=sm_mhz, per_clock=per_clock)
    return exps / (sms * sm_mhz * 1e3 * per_clock)


@dataclass(frozen=True)
class Peaks:
    """What a data sheet promises of one GPU.

    tb_per_s: memory bandwidth, TB/s (10^12 bytes).
    nvlink_gb_per_s: all links of the GPU, both directions added, as data sheets and white papers give it; None without
        NVLink.
    tflops: dtype (`bf16`, `fp16`, `tf32`, `fp32`, `fp64`) → dense TFLOP/s with fp32 accumulation, on tensor cores
        where they take this dtype; what is missing is unsupported or not known for sure.
    """

    tb_per_s: float
    nvlink_gb_per_s: float | None = None
    tflops: dict[str, float] = field(default_factory=dict)

    @property
    def nvlink_one_way_gb_per_s(self) -> float | None:
        """What the GPU can send, and at the same time receive, GB/s: half of `nvlink_gb_per_s`."""
        return None if self.nvlink_gb_per_s is None else self.nvlink_gb_per_s / 2

    def roofline_ms(self, flops: float, num_bytes: float, dtype: str) -> float | None:
        """`roofline_ms` at these peaks; None if the peak of the dtype is not known."""
        peak = self.tflops.get(dtype)
        return None if peak is None else roofline_ms(flops, num_bytes, peak, self.tb_per_s)


# H100 and H200 data sheets; tensor-core figures there are with sparsity, so halved here.
_HOPPER_SXM = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9}
_HOPPER_NVL = {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0}
# A100 data sheet (dense figures given there).
_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5}
_V100_SXM2 = Peaks(0.9, 300, {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8})  # V100 data sheet

# By the device's full name as the driver gives it, less the maker's and product lines' names: a chip's
# variants (SXM, PCIe, NVL, a laptop's) share a name but not their peaks. An SXM H100 calls itself "NVIDIA
# H100 80GB HBM3".
_PEAKS = {
    "h100 80gb hbm3": Peaks(3.35, 900, _HOPPER_SXM),
    "h100 pcie": Peaks(2.0, 600, {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.0, "fp64": 51.0}),
    "h100 nvl": Peaks(3.9, 600, _HOPPER_NVL),
    "h200": Peaks(4.8, 900, _HOPPER_SXM),
    "h200 nvl": Peaks(4.8, 900, _HOPPER_NVL),
    "b200": Peaks(8.0, 1800, {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0}),  # an eighth of HGX B200
    "a100 sxm4 40gb": Peaks(1.555, 600, _A100),
    "a100 sxm4 80gb": Peaks(2.039, 600, _A100),
    "a100 pcie 40gb": Peaks(1.555, 600, _A100),
    "a100 80gb pcie": Peaks(1.935, 600, _A100),
    "v100 sxm2 16gb": _V100_SXM2,
    "v100 sxm2 32gb": _V100_SXM2,
    # data sheets of A10, L4 and L40S
    "a10": Peaks(0.6, None, {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2}),
    "l4": Peaks(0.3, None, {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3}),
    "l40s": Peaks(0.864, None, {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6}),
    # Turing architecture white paper (TU104, Tesla T4); no bf16, no TF32
    "t4": Peaks(0.32, None, {"fp16": 65.0, "fp32": 8.1}),
    # GA102 and Ada white papers; half precision at the rate of fp32 accumulation
    "rtx 3090": Peaks(0.936, 112.5, {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6}),
    "rtx 4090": Peaks(1.008, None, {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
}


def peaks(device_name: str) -> Peaks | None:
    """The data-sheet peaks of a GPU by its full name, "NVIDIA H100 80GB HBM3"; None if it is not listed.

    The name must fit as a whole: a variant that is not listed (a laptop's chip, a slice of a GPU) gets no
    guess.
    """
    words = re.sub(r"[^a-z0-9 ]+", " ", device_name.lower()).split()
    return _PEAKS.get(" ".join(w for w in words if w not in ("nvidia", "tesla", "geforce")))
