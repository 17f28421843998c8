"""Collectives counted by the dispatcher, kernels beside each other, a link's counters."""

from __future__ import annotations

import gc
import time
import types

import distributed
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from cs336_systems.measure.counters import collectives  # noqa: E402
from cs336_systems.measure.counters.collectives import Collectives, beside, link_bytes  # noqa: E402
from cs336_systems.measure.trace.events import Kernel, Trace  # noqa: E402

NCCL = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>(...)"


def count_by_hand():
    x, parts = torch.ones(6), [torch.empty(3) for _ in range(2)]
    with Collectives() as sent:
        dist.all_reduce(x)
        dist.all_reduce(x[:2], async_op=True).wait()
        dist.broadcast(x, 1)
        dist.all_gather(parts, x[:3])
        y = x * 2  # no collective
    dist.broadcast(y, 0)  # not in the block
    assert sent.kinds == ["all_gather", "all_reduce", "broadcast"]
    assert (sent.calls("all_reduce"), sent.num_bytes("all_reduce")) == (2, 24 + 8)
    assert (sent.calls("broadcast"), sent.num_bytes("broadcast")) == (1, 24)
    assert (sent.calls("all_gather"), sent.num_bytes("all_gather")) == (1, 12 + 2 * 12)
    assert (sent.calls("reduce_scatter"), sent.num_bytes("reduce_scatter")) == (0, 0)


def count_in_backward():
    """torch's container calls from C++, in a hook of the backward pass."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
    for _ in range(3):  # in the second step the ranks agree on new buckets
        with Collectives() as sent:
            model(torch.ones(2, 8)).sum().backward()
    assert sent.kinds == ["all_reduce"]
    assert sent.num_bytes("all_reduce") == 4 * (8 * 4 + 4)
    # the bucket that was reduced is the container's, for as long as it lives
    assert sum(n for _, n in sent.living_storages()) >= 4 * 36
    del model
    assert_gone(sent)


def what_was_sent_is_not_kept():
    x = torch.ones(100)
    with Collectives() as sent:
        dist.all_reduce(x[:50])
        dist.all_reduce(x)
    assert [n for _, n in sent.living_storages()] == [400]  # one storage, once
    del x
    assert_gone(sent)


def assert_gone(sent):
    """Nothing that was sent is alive, as soon as Gloo's threads have let go of it."""
    deadline = time.monotonic() + 20
    while list(sent.living_storages()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not list(sent.living_storages())


def on_two_ranks():
    count_by_hand()
    count_in_backward()
    what_was_sent_is_not_kept()


def test_on_two_ranks():
    distributed.run(on_two_ranks, 2)


def kernel(name, start_ms, end_ms):
    return Kernel(name, int(start_ms * 1e6), int(end_ms * 1e6), 0, 7, None, 1, None)


def test_kernels_beside_each_other():
    trace = Trace("torch", (
        kernel(ADAM, 0, 2), kernel(NCCL, 2, 6), kernel(ADAM, 2, 4), kernel(ADAM, 5, 6.5), kernel(NCCL, 6.5, 9),
        kernel("void at::native::elementwise_kernel<FillFunctor>(...)", 20, 30),
    ), ())  # fmt: skip
    found = beside(trace)
    assert found.launches == 2
    assert found.update_ms == pytest.approx(2 + 2 + 1.5)
    assert found.communication_ms == pytest.approx(4 + 2.5)
    assert found.both_ms == pytest.approx(2 + 1)
    assert found.whole_ms == pytest.approx(9)
    nothing = beside(Trace("torch", (), ()))
    assert (nothing.launches, nothing.whole_ms, nothing.both_ms) == (0, 0, 0)
    [alone] = {beside(Trace("torch", (kernel(ADAM, 1, 3),), ()))}
    assert (alone.update_ms, alone.communication_ms, alone.both_ms, alone.whole_ms) == (2, 0, 0, 2)


class FakeNvml(types.ModuleType):
    """NVML with NVLink counters of 5 and 7 KiB, or what else is asked for."""

    NVML_SUCCESS, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 0, 138, 139

    class NVMLError(Exception):
        pass

    def __init__(self, code=0, error=None):
        super().__init__("pynvml")
        self.code, self.error, self.asked = code, error, []

    def nvmlInit(self):
        if self.error:
            raise self.error

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetFieldValues(self, handle, fields):
        self.asked.append((handle, fields))
        values = [types.SimpleNamespace(ullVal={138: 5, 139: 7}[field]) for field, _ in fields]
        return [types.SimpleNamespace(nvmlReturn=self.code, value=value) for value in values]


@pytest.fixture
def fake_gpu(monkeypatch):
    known = lambda index: types.SimpleNamespace(uuid=f"uuid-{index}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", known)
    monkeypatch.setattr(collectives, "has_module", lambda name: True)
    return lambda module: monkeypatch.setitem(__import__("sys").modules, "pynvml", module)


def test_bytes_of_a_link(fake_gpu, monkeypatch):
    nvml = FakeNvml()
    fake_gpu(nvml)
    assert link_bytes(1) == (5 * 1024, 7 * 1024)
    assert nvml.asked == [("GPU-uuid-1", [(138, 0xFFFFFFFF), (139, 0xFFFFFFFF)])]  # the sum over all ports
    for tells_nothing in (FakeNvml(code=3), FakeNvml(error=FakeNvml.NVMLError("no driver"))):
        fake_gpu(tells_nothing)
        assert link_bytes(0) is None
    monkeypatch.setattr(collectives, "has_module", lambda name: False)
    assert link_bytes(0) is None
