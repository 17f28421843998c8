"""The machine's name and environment, without depending on what this machine is."""

import json
import platform
import sys
import types

import pytest

from cs336_systems.store import machine


def test_gpu_slug():
    for name, slug in {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H200": "h200",
        "NVIDIA H200 NVL": "h200-nvl", "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100 80GB PCIe": "a100-pcie", "Tesla V100-SXM2-16GB": "v100-16gb",
        "Tesla T4": "t4", "NVIDIA GeForce RTX 4090": "rtx-4090", "GPU": "gpu",
        "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx-4090-laptop", "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    }.items():  # fmt: skip
        assert machine.gpu_slug(name) == slug


@pytest.fixture
def uncached():
    machine.machine_name.cache_clear()
    yield
    machine.machine_name.cache_clear()


def test_machine_is_named_by_its_hardware(monkeypatch, uncached):
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"] * 4)
    assert machine.machine_name() == "h200-x4"
    machine.machine_name.cache_clear()
    monkeypatch.setattr(machine, "gpu_names", list)
    monkeypatch.setattr(machine, "cpu_cores", lambda: 6)
    assert machine.machine_name() == "cpu-6"


def test_environment_is_json_and_names_no_host():
    env = machine.environment()
    text = json.dumps(env)
    assert {"cpu", "cores", "python", "torch", "triton"} <= set(env)
    assert len(platform.node()) < 3 or platform.node() not in text


def test_digest_follows_the_content_and_not_the_order():
    a = machine.environment_digest({"torch": "2.11", "cores": 2})
    assert a == machine.environment_digest({"cores": 2, "torch": "2.11"})
    assert a != machine.environment_digest({"cores": 2, "torch": "2.13"})
    assert len(a) == 8 and int(a, 16) >= 0


def test_what_is_not_there(monkeypatch):
    assert machine.package_version("no-such-package-anywhere") is None
    assert not machine.has_module("no_such_module_anywhere") and machine.has_module("json")
    monkeypatch.setenv("PATH", "")
    assert machine._driver_versions() == ["unknown (FileNotFoundError)"]


@pytest.mark.parametrize(("there", "said"), [(1, None), (4, 4)])
def test_gpus_that_the_run_was_not_given_are_told(monkeypatch, there, said):
    import torch

    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(machine, "_driver_versions", lambda: ["580.1"] * there)
    known = types.SimpleNamespace(total_memory=2**37, multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
    env = machine.environment.__wrapped__()
    assert (env["gpus"], env["driver"], env.get("gpus_in_machine")) == (1, "580.1", said)


@pytest.mark.parametrize(
    ("used", "own", "others"),
    [
        ([1.3, 1.3], [0, 0], 0),
        ([31.3, 1.3], [30, 0], 0),
        ([1.3, 51.3], [0, 20], 31.3),
        ([None, 90], [0, 0], 0),
    ],
)
def test_memory_that_other_processes_hold(monkeypatch, used, own, others):
    """GiB of two GPUs; None: NVML cannot tell."""
    import torch

    class NVMLError(Exception):
        pass

    def device_memory_used(index):
        if used[index] is None:
            raise NVMLError
        return used[index] * 2**30

    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(NVMLError=NVMLError))
    monkeypatch.setattr(machine, "has_module", lambda name: True)
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    monkeypatch.setattr(torch.cuda, "device_memory_used", device_memory_used)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: own[index] * 2**30)
    assert machine.memory_of_others_gib() == pytest.approx(others)
    monkeypatch.setattr(machine, "gpu_names", list)
    assert machine.memory_of_others_gib() == 0


def groups(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return machine._free_in_containers(folder, folder / "own")


def test_what_a_container_leaves(tmp_path):
    none = groups(tmp_path / "none", {})
    newer = groups(tmp_path / "v2", {
        "own": "0::/a/b\n", "a/b/memory.max": "max\n", "a/b/memory.current": "70\n", "a/b/memory.stat": "anon 60\n",
        "a/memory.max": "1000\n", "a/memory.current": "700\n",
        "a/memory.stat": "anon 400\nactive_file 100\ninactive_file 200\n",
    })  # fmt: skip
    inside = groups(tmp_path / "inside", {
        "own": "0::/of/the/host\n", "memory.max": "500\n", "memory.current": "600\n", "memory.stat": "file 1\n",
    })  # fmt: skip
    older = groups(tmp_path / "v1", {
        "own": "5:devices:/d\n4:memory:/d\n0::/\n", "memory/d/memory.limit_in_bytes": "300\n",
        "memory/d/memory.usage_in_bytes": "100\n", "memory/d/memory.stat": "inactive_file 9\ntotal_inactive_file 50\n",
    })  # fmt: skip
    assert (none, newer, inside, older) == ([], [600], [0], [250])


def test_free_memory_is_the_least_of_machine_and_containers(monkeypatch):
    monkeypatch.setattr(machine, "_free_in_containers", lambda: [2**40, 2**20])
    assert machine.free_memory_bytes("cpu") == 2**20
    monkeypatch.setattr(machine, "_free_in_containers", list)
    assert machine.free_memory_bytes("cpu") > 2**20
    monkeypatch.setattr(machine, "_free_on_machine", lambda: None)
    assert machine.free_memory_bytes("cpu") is None
