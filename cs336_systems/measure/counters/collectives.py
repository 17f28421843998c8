"""What is sent: the collectives that a process issues, counted as torch's dispatcher sees them, and a link's bytes.

    with Collectives() as sent:
        step()
    sent.calls("all_reduce"), sent.num_bytes("all_reduce")
    buffer_bytes = sum(n for _, n in sent.living_storages())

Every collective of c10d is an operator of the dispatcher, whoever calls it: this project's Python, torch's DDP in C++
from a hook of the backward pass, an optimizer. So one place sees them all, on any backend. What is counted is the
*payload*, the bytes of the tensors that are given to the collective; what a rank puts on the wire for it depends on
the algorithm (`accounting.zero_step_bytes` has the formulas). Calls inside one group call of NCCL are counted one by
one here, although they are launched as one: `Beside.launches` counts kernels.

A GPU's own counters of its NVLink ports (`link_bytes`) tell what really went over the wire, protocol overhead included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cs336_systems.measure.trace.events import Trace, union_ns
from cs336_systems.measure.trace.kernels import COMMUNICATION, OPTIMIZER, class_of
from cs336_systems.store.machine import has_module

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "send": "send",
    "recv_": "receive",
}
"""Operator of c10d → what it is called here; others keep their own name without underscores at the ends."""

_ALL_LINKS = 0xFFFFFFFF  # NVML's scope for the sum over all ports
_KIB = 1024


class Collectives:
    """Counts the collectives that this process issues inside the `with` block, its backward passes included.

    Autograd hands the counting over to the threads that run a backward pass. It costs the host some time for every
    operator, so a step that is counted is not timed. Tensors are not kept alive by being counted.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._storages: dict[int, tuple[Any, int]] = {}  # address of a storage → weak reference, bytes

    def __enter__(self) -> Collectives:
        self._mode = _mode(self._note)
        self._mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)

    def _note(self, name: str, tensors: list[Any]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        kind = KINDS.get(name, name.strip("_"))
        self._calls[kind] += 1
        self._bytes[kind] += sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._storages.get(storage._cdata)
            if known is None or known[0].expired():
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def calls(self, kind: str) -> int:
        """How many collectives of a kind (`"all_reduce"`, `"broadcast"`, ...) were issued."""
        return self._calls[kind]

    def num_bytes(self, kind: str) -> int:
        """The payload of a kind: bytes of the tensors that its collectives were given."""
        return self._bytes[kind]

    @property
    def kinds(self) -> list[str]:
        """The kinds that occurred."""
        return sorted(self._calls)

    def living_storages(self) -> Iterator[tuple[int, int]]:
        """(identity, bytes) of each storage that a collective was given and that still exists."""
        for identity, (reference, num_bytes) in self._storages.items():
            if not reference.expired():
                yield identity, num_bytes


def _mode(note: Callable[[str, list[Any]], None]) -> Any:
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "c10d":
                # the outputs of gathering operators come first; each tensor is counted once
                leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                note(operator._opname, leaves)
            return operator(*args, **(kwargs or {}))

    return Watch()


# --------------------------------------------------------------------------------------------- launches and their time
@dataclass(frozen=True)
class Beside:
    """Communication beside an optimizer's kernels in a recording. Times are in ms, on one device."""

    launches: int  # of communication kernels
    communication_ms: float  # a communication kernel was running
    update_ms: float  # a kernel of the optimizer was running
    both_ms: float  # both at once
    whole_ms: float  # from the first kernel of either to the end of the last


def beside(trace: Trace) -> Beside:
    """How an optimizer's kernels and communication overlap in a recording of GPU kernels."""
    spans = {
        kind: np.array([(k.start_ns, k.end_ns) for k in trace.kernels if class_of(k.name) == kind], int)
        for kind in (COMMUNICATION, OPTIMIZER)
    }
    spans = {kind: found.reshape(-1, 2) for kind, found in spans.items()}
    lengths = {kind: union_ns(found[:, 0], found[:, 1]) for kind, found in spans.items()}
    every = np.concatenate(list(spans.values()))
    together = union_ns(every[:, 0], every[:, 1])
    whole = int(every[:, 1].max() - every[:, 0].min()) if len(every) else 0
    return Beside(
        launches=len(spans[COMMUNICATION]),
        communication_ms=lengths[COMMUNICATION] / 1e6,
        update_ms=lengths[OPTIMIZER] / 1e6,
        both_ms=(sum(lengths.values()) - together) / 1e6,
        whole_ms=whole / 1e6,
    )


# ------------------------------------------------------------------------------------------------------- on the wire
def link_bytes(device: int) -> tuple[int, int] | None:
    """(sent, received): the data bytes that a GPU's NVLink ports have counted so far; None where NVML does not tell.

    device: torch's index. NVML counts in KiB, over all ports together, everybody's traffic.
    """
    if not has_module("pynvml"):
        return None
    import pynvml
    import torch

    fields = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        values = pynvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS) for field in fields])
    except pynvml.NVMLError:  # no driver, no permission, no such counters: nothing to read, as documented
        return None
    if any(value.nvmlReturn != pynvml.NVML_SUCCESS for value in values):
        return None
    sent, received = (int(value.value.ullVal) * _KIB for value in values)
    return sent, received
