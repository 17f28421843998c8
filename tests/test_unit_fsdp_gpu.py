"""Fully sharded training between GPUs, through NCCL: the weights of one, a host that never waits, few units held."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from cs336_systems.launch.start import launch
from cs336_systems.model import build
from cs336_systems.parallel.fsdp import FullyShardedDataParallel
from cs336_systems.sizes import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CONFIG = ModelConfig(256, 1024, 4, 4, vocab_size=1000, context_length=64)


def model_on(rank):
    torch.manual_seed(0)
    return build(CONFIG, "sdpa", device=rank.device)


def sharded(model, units, **options):
    return FullyShardedDataParallel(model, units=model.layers if units == "block" else None, **options)


def ids_of(step, sequences, device):
    g = torch.Generator().manual_seed(step)
    return torch.randint(CONFIG.vocab_size, (sequences, CONFIG.context_length), generator=g).to(device)


def step_of(model, optimizer, ids):
    loss = model(ids).float().logsumexp(-1).square().mean()
    loss.backward()
    if isinstance(model, FullyShardedDataParallel):
        model.finish_gradient_synchronization()
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_beside_one(rank):
    """(units, dtype, reshard) → the largest deviation of a weight after five steps from those of one GPU."""
    found = {}
    for units, dtype, reshard in itertools.product(("layer", "block"), (None, torch.bfloat16), (True, False)):
        module = model_on(rank)
        alone = copy.deepcopy(module)
        model = sharded(module, units, compute_dtype=dtype, reshard_after_forward=reshard)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
        for step in range(5):
            ids = ids_of(step, 4, rank.device)
            step_of(model, optimizers[0], ids.chunk(2)[rank.rank])
            step_of(alone, optimizers[1], ids)
        with model.full_parameters():
            off = [
                (p - q).abs().max().item()
                for p, q in zip(module.parameters(), alone.parameters(), strict=True)
            ]
        moved = max(
            (p - q).abs().max().item()
            for p, q in zip(alone.parameters(), model_on(rank).parameters(), strict=True)
        )
        found[f"{units} {dtype} {reshard}"] = max(off) / moved
    return found


def test_weights_are_those_of_one_gpu():
    for found in launch(f"{__name__}:train_beside_one", 2):
        for name, off in found.items():
            assert off < (0.1 if "bfloat16" in name else 1e-3), name


def step_without_waiting(rank):
    """Steps in which torch raises at every operation that the host waits for."""
    for units, dtype in itertools.product(("layer", "block"), (None, torch.bfloat16)):
        model = sharded(model_on(rank), units, compute_dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = [ids_of(step, 2, rank.device) for step in range(5)]
        for step in range(5):
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            step_of(model, optimizer, ids[step])
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_waits_for_nothing():
    launch(f"{__name__}:step_without_waiting", 2)


def peak_of_units(rank):
    """(units, dtype) → bytes at the peak of a forward pass, above those between steps; of two units; of a shard."""
    found = {}
    for units, dtype in itertools.product(("layer", "block"), (None, torch.bfloat16)):
        model = sharded(model_on(rank), units, compute_dtype=dtype)
        ids = ids_of(0, 1, rank.device)[:, :2]  # activations of few bytes
        with torch.no_grad():
            model(ids)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(ids)
            peak = torch.cuda.max_memory_allocated() - before
        item = (dtype or torch.float32).itemsize
        sizes = sorted(sum(w.shape.numel() for w in flat.weights) * item for flat in model.flats)
        found[f"{units} {dtype}"] = [peak, sum(sizes[-2:]), sizes[-1] // 2]
    return found


def test_forward_holds_two_units_and_the_shard_on_its_way():
    for found in launch(f"{__name__}:peak_of_units", 2):
        for name, (peak, two, shard) in found.items():
            assert peak < two + 2 * shard + 2**20, name
