"""Launches `hopper_kernels`: the configurations, and the buffers that its kernel shares with those of
`attention.hopper.backward_ends`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from cs336_systems.attention.hopper.backward_dq import DQ_COLUMNS
from cs336_systems.attention.hopper.backward_ends import finish_kernel, prepare_kernel
from cs336_systems.attention.hopper.configs import GROUP, dq_tile
from cs336_systems.attention.hopper.launch import KEYS, addressable, reason_against, section_of
from cs336_systems.attention.hopper.tma import descriptor
from cs336_systems.attention.triton.launch import FUSED, LOG2_E
from cs336_systems.ladder.hopper_kernels import single_keys_kernel

HEAD_DIM = 64  # that smaller ones are padded to
_ROWS = 64  # of a program of the kernels before and after


@dataclass(frozen=True)
class Backward:
    """Queries of a tile, and tiles in flight. dq_group: dQ has a group of its own. ahead (with dq_group only): a
    tile's P is computed beside the last matmuls of the previous tile. k_registers: K is read from registers."""

    block_m: int
    stages: int
    dq_group: bool = False
    ahead: bool = False
    k_registers: bool = False

    def __post_init__(self) -> None:
        # so that registers suffice, and two groups can share the work for dQ
        rows = GROUP if self.dq_group else 2 * GROUP
        if self.block_m != rows:
            raise ValueError(f"block_m={self.block_m} with dq_group={self.dq_group}; allowed: {rows}")
        if self.ahead and not self.dq_group:
            raise ValueError("ahead=True with dq_group=False; ahead is allowed with dq_group=True only")
        if self.ahead and self.stages < 2:  # it would wait for a tile in a slot that it still occupies
            raise ValueError(f"ahead=True with stages={self.stages}; allowed: 2 and more")


def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool, config: Backward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV of tensors (batch, heads, n, d) in 16 bits that TMA can read, d of 33 to 64; o and L (batch, heads,
    n_q) as forward returns them. ValueError for others. dQ's last bits depend on the order of additions."""
    batch, heads, num_queries, head_dim = q.shape
    if head_dim > HEAD_DIM:
        raise ValueError(f"head dimension {head_dim}; allowed: up to {HEAD_DIM}")
    if reason := reason_against(q, k, v):
        raise ValueError(reason)
    if not addressable(do):
        raise ValueError(f"do: TMA cannot read strides {do.stride()}; expected a contiguous tensor")
    num_keys, batch_heads, scale = k.shape[2], batch * heads, head_dim**-0.5
    query_tiles, key_tiles = triton.cdiv(num_queries, config.block_m), triton.cdiv(num_keys, KEYS)
    rows = query_tiles * config.block_m
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    fp32 = {"device": q.device, "dtype": torch.float32}
    stats = torch.empty(2 * batch_heads, rows, **fp32)
    dq_sum = torch.empty(batch_heads, rows * HEAD_DIM // DQ_COLUMNS.value, DQ_COLUMNS.value, **fp32)
    counters = torch.empty(1 + batch_heads, device=q.device, dtype=torch.int32)  # for the kernel in use
    ends = {"HEAD_DIM": head_dim, "WIDTH": HEAD_DIM, "D": HEAD_DIM, "num_warps": 4} | FUSED
    prepare_kernel[(triton.cdiv(rows, _ROWS) * batch_heads,)](
        o, do, logsumexp, stats, dq_sum, do, counters, *o.stride()[:3], *do.stride(), heads, num_queries, rows,
        ROWS=_ROWS, TILE_ROWS=0, ZEROED=True, **ends,
    )  # fmt: skip
    queries, of_group = (1, 1, config.block_m, HEAD_DIM), (1, 1, GROUP, HEAD_DIM)
    single_keys_kernel[(key_tiles * batch_heads,)](
        descriptor(q, *queries), descriptor(k, 1, 1, KEYS, HEAD_DIM), descriptor(v, *of_group),
        descriptor(do, *queries), descriptor(dk, *of_group), descriptor(dv, *of_group),
        descriptor(dq_sum, 1, *dq_tile(0, False), swizzled=False),
        descriptor(stats, 1, config.block_m, swizzled=False),
        heads, batch_heads, section_of(batch_heads, 8 * num_queries * HEAD_DIM), key_tiles, query_tiles, num_keys,
        scale * LOG2_E, scale, IS_CAUSAL=is_causal, D=HEAD_DIM, num_warps=4, **constants_of(config), **FUSED,
    )  # fmt: skip
    finish_kernel[(triton.cdiv(num_queries, _ROWS) * batch_heads,)](
        dq_sum, dq, *dq.stride()[:3], heads, num_queries, rows, scale, TRANSPOSED=config.dq_group, launch_pdl=True,
        **ends,
    )  # fmt: skip
    return dq, dk, dv


def constants_of(config: Backward) -> dict[str, int]:
    """A configuration as constants of the kernel."""
    return {
        "BLOCK_M": config.block_m, "STAGES": config.stages, "DQ_GROUP": config.dq_group, "AHEAD": config.ahead,
        "K_REGISTERS": config.k_registers,
    }  # fmt: skip
