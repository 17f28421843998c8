"""The CUDA C++ kernels without a GPU: compiled ahead of time for each generation, kept on disk, or refused."""

import re
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from cs336_systems.attention import available, registry  # noqa: E402
from cs336_systems.attention.cuda import compile as nvrtc  # noqa: E402
from cs336_systems.attention.cuda import launch, tables  # noqa: E402
from cs336_systems.attention.inputs import MIN_HEAD_DIM  # noqa: E402

REASON = nvrtc.missing()
needs_nvrtc = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FILES = {"forward.cu": tables.FORWARD, "backward.cu": tables.BACKWARD}
# KiB of shared memory: of a block, of a multiprocessor, and what the system takes of each block
# (CUDA C++ Programming Guide, technical specifications per compute capability)
SHARED = {75: (64, 64, 0), 80: (163, 164, 1), 86: (99, 100, 1), 89: (99, 100, 1), 90: (227, 228, 1),
          100: (227, 228, 1), 120: (99, 100, 1)}  # fmt: skip
PARAMETERS = 352  # bytes in constant memory before a kernel's argument, up to compute capability 8.9
KERNEL = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers(?:[^\n]*?(\d+) bytes cmem\[0\])?",
    re.DOTALL,
)
SPILLED = 160  # bytes of a thread, written and read: little beside what it multiplies in a tile


def config_of(file, capability, head_dim):
    return tables.chosen(FILES[file], capability, tables.padded(capability, head_dim))


def compiled(file, capability, head_dim, dtype, is_causal=True, aligned=True, expanded=False, in_turns=False):
    """Spilled bytes, registers and bytes of constants (0: the compiler did not say) of each of a file's kernels."""
    more = {"DO_VECTORS": not expanded, "IN_TURNS": in_turns} if file == "backward.cu" else {}
    macros = launch.macros_for(
        config_of(file, capability, head_dim), capability, head_dim, is_causal, dtype, aligned=aligned, **more
    )
    code, log = nvrtc.compile_file(file, capability, macros, "--ptxas-options=-v")
    assert code[:4] == b"\x7fELF" and "warning" not in log
    found = {name: [int(n or 0) for n in numbers] for name, *numbers in KERNEL.findall(log)}
    assert len(found) == (1 if file == "forward.cu" else 3)
    return {name: (stores + loads, *rest) for name, (stores, loads, *rest) in found.items()}


@pytest.mark.parametrize("capability", SHARED)
def test_tiles_fit_shared_memory(capability):
    of_block, of_all, taken = SHARED[capability]
    for file in FILES:
        for head_dim in range(MIN_HEAD_DIM, tables.MAX_HEAD_DIM + 1):
            config = config_of(file, capability, head_dim)
            kib = config.shared_bytes(tables.padded(capability, head_dim)) / 1024
            blocks = 1 if file == "forward.cu" and capability < 80 and head_dim > 64 else config.blocks
            assert kib <= of_block and blocks * (kib + taken) <= of_all, (file, head_dim)


# 8.6 and 8.9 have the same tiles, 9.0 and 10.0 too; the oldest and the newest are compiled in every run
@needs_nvrtc
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("capability", "head_dim"),
    [
        (75, 64),
        (75, 128),
        (90, 64),
        (90, 128),
        *(pytest.param(sm, d, marks=pytest.mark.table) for sm in (80, 86) for d in (64, 128)),
    ],
)
def test_kernels_fit_each_generation(file, capability, head_dim):
    dtype = torch.float16 if capability < 80 or head_dim == 128 else torch.bfloat16
    config = config_of(file, capability, head_dim)
    found = compiled(file, capability, head_dim, dtype)
    for name, (spilled, registers, constants) in found.items():
        large = name in ("forward_kernel", "keys_kernel")
        assert spilled <= (SPILLED if large and capability >= 80 else 0), name
        assert registers <= (255 if large else 64), name
        assert registers * 32 * config.warps * (config.blocks if large else 1) <= 2**16, name
        if constants:  # the argument is as long as the launcher packs it
            assert constants - PARAMETERS == launch.ARGUMENTS[name].size, name


@needs_nvrtc
@pytest.mark.table
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("capability", SHARED)
def test_everything_that_is_launched_compiles(file, capability):
    dtypes = (torch.float16,) if capability < 80 else (torch.float16, torch.bfloat16)
    flags = ("is_causal", "aligned", "in_turns")[: 2 if file == "forward.cu" else 3]
    for head_dim in (17, 64, 128):
        for number in range(2 ** len(flags)):
            given = {flag: bool(number >> bit & 1) for bit, flag in enumerate(flags)}
            given["expanded"] = not given["aligned"]
            found = compiled(file, capability, head_dim, dtypes[number % len(dtypes)], **given)
            assert max(spilled for spilled, *_ in found.values()) <= 3 * SPILLED, (head_dim, given)


@needs_nvrtc
def test_what_does_not_compile_says_why():
    with pytest.raises(RuntimeError, match=r"forward\.cu does not compile for sm_80:(.|\n)*BLOCK_M"):
        nvrtc.compile_file("forward.cu", 80, {})


# ---------------------------------------------------------------------------------------------- on disk
@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """How often something was compiled; what comes of it is a stand-in."""
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_file", lambda *what: (calls.append(what), (b"code", ""))[1])
    return calls


def test_machine_code_is_kept_on_disk(compiler, monkeypatch):
    for _ in range(2):
        assert nvrtc.cubin("forward.cu", 80, {"BLOCK_M": 64}) == b"code"
    assert len(compiler) == 1
    nvrtc.cubin("forward.cu", 80, {"BLOCK_M": 32})
    nvrtc.cubin("forward.cu", 90, {"BLOCK_M": 64})
    nvrtc.cubin("backward.cu", 80, {"BLOCK_M": 64})
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 5))
    nvrtc.cubin("forward.cu", 80, {"BLOCK_M": 64})
    monkeypatch.setattr(nvrtc, "_source", lambda name: name.encode())
    nvrtc.cubin("forward.cu", 80, {"BLOCK_M": 64})
    assert len(compiler) == 6


@pytest.mark.parametrize("left", [0, 10, 33])
def test_a_damaged_file_is_compiled_again(compiler, left):
    nvrtc.cubin("forward.cu", 80, {})
    [file] = nvrtc.folder().iterdir()
    file.write_bytes(file.read_bytes()[:left])
    assert [nvrtc.cubin("forward.cu", 80, {}) for _ in range(2)] == [b"code"] * 2
    assert len(compiler) == 2


def without_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(nvrtc.Path, "home", home)


def with_a_full_disk(monkeypatch):
    def write_bytes(path, content):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nvrtc.Path, "write_bytes", write_bytes)


def with_a_file_in_its_place(monkeypatch):
    nvrtc.folder().write_text("a file")


@pytest.mark.parametrize("hindered", [without_home, with_a_full_disk, with_a_file_in_its_place])
def test_where_nothing_is_kept_each_call_compiles(compiler, hindered, monkeypatch, tmp_path):
    hindered(monkeypatch)
    assert [nvrtc.cubin("forward.cu", 80, {}) for _ in range(2)] == [b"code"] * 2 and len(compiler) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() != b"a file"]


# ---------------------------------------------------------------------------------------------- what it is given
def test_rows_that_are_read_in_vectors():
    x = torch.zeros(2, 3, 8, 72, dtype=torch.float16)
    assert all(map(launch._aligned, (x, x[..., :64], x.transpose(1, 2), x[:, :, ::2], x[:1, :1])))
    others = x[..., 4:68], x[..., :60], x.mT, torch.zeros(()).expand(2, 3, 8, 64)
    assert not any(map(launch._aligned, others))
    # of a tile's other rows addresses are computed, even if there are none
    assert not launch._aligned(torch.zeros(1, 1, 4, 65)[..., :1, :64])


def test_a_gpu_that_is_too_old_is_told():
    with pytest.raises(ValueError, match=r"compute capability 6\.1; allowed: 7\.5 and later"):
        tables.chosen(tables.FORWARD, 61, 64)


# ---------------------------------------------------------------------------------------------- reasons
def without_bindings(monkeypatch):
    def find_spec(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", find_spec)
    return r"cuda-bindings is not installed \(pip install"


def without_library(monkeypatch):
    def version():
        raise RuntimeError("no libnvrtc.so\nlooked here and there")

    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nvrtc, "version", version)
    return r"NVRTC is not found, the package nvidia-cuda-nvrtc has it \(no libnvrtc.so\)$"


def with_nvrtc(monkeypatch, driver=13000):
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = types.SimpleNamespace(cuDriverGetVersion=lambda: (0, driver))
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 5))
    return None


def with_an_older_driver(monkeypatch):
    with_nvrtc(monkeypatch, 12080)
    return r"NVRTC 13\.5 is newer than the driver, which is of CUDA 12\.8$"


@pytest.mark.parametrize("machine", [without_bindings, without_library, with_nvrtc, with_an_older_driver])
def test_the_registry_says_what_is_missing(machine, monkeypatch):
    expected = machine(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available.cuda_reason() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *index: (7, 0))
    assert available.cuda_reason() == "compute capability 7.0 is older than 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *index: (7, 5))
    found = registry.IMPLEMENTATIONS["flash_cuda"].reason()
    assert found is None if expected is None else re.match(expected, found)


def test_cpu_tensors_are_refused():
    q = torch.zeros(1, 8, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match="flash_cuda got tensors on device 'cpu'"):
        registry.IMPLEMENTATIONS["flash_cuda"].call(q, q, q, False)


def test_what_forward_cannot_have_made_is_refused():
    q, logsumexp = torch.zeros(1, 2, 8, 16, dtype=torch.float16), torch.zeros(1, 2, 8)
    for o, grad_o, name in ((q.float(), q, "o"), (q, q.float(), "grad_o")):
        with pytest.raises(
            ValueError, match=rf"^{name} is torch.float32 .*; expected what q is, torch.float16"
        ):
            launch.launch_backward(q, q, q, o, logsumexp, grad_o, True)
