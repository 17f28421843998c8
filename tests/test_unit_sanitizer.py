"""The attention kernels under NVIDIA's compute-sanitizer: no access outside what they were given."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.gpu
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer, part of the CUDA toolkit, is not installed")
@pytest.mark.parametrize("kernels", ["portable", "hopper"])
def test_memory_is_accessed_where_it_may_be(kernels):
    if kernels == "hopper":
        from cs336_systems.attention import hopper_reason

        if reason := hopper_reason():
            pytest.skip(reason)
    script = Path(__file__).with_name("attention_once.py")
    done = subprocess.run(
        [TOOL, "--tool", "memcheck", "--print-limit", "5", sys.executable, str(script), kernels],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert f"{kernels}: all as in fp64" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-2000:]
