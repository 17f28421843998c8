"""The tensors that a block makes and that are alive, counted by the dispatcher: what closed forms are held against."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveBytes(TorchDispatchMode):
    """Notes, after each operation, the bytes of all storages made under it that are still alive, and their peak.

    On CUDA the gradient of softmax makes one more tensor inside, the product of its two inputs, and so it does in the
    peak here.
    """

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak, self.after = set(), 0, 0, []

    def freed(self, key, num_bytes):
        self.known.remove(key)
        self.now -= num_bytes

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, num_bytes = storage._cdata, storage.nbytes()
                if key not in self.known:
                    self.known.add(key)
                    self.now += num_bytes
                    weakref.finalize(storage, self.freed, key, num_bytes)
        softmax = operator is torch.ops.aten._softmax_backward_data.default
        self.peak = max(self.peak, self.now + (args[0].nbytes if softmax else 0))
        self.after.append((operator, self.now))
        return made


def saved_storages(known=()):
    """A context in which autograd's saved tensors are noted, and the bytes of their storages; `known` are left out."""
    known, found = {tensor.untyped_storage()._cdata for tensor in known}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage  # held, so that no other gets its place
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), found
