"""Closed forms, against counts that are made another way."""

import itertools
import math

import pytest

from cs336_systems import accounting


def test_attention_forward_is_two_products_and_backward_five():
    batch_heads, queries, keys, d = 3, 7, 11, 13
    product = batch_heads * accounting.matmul_flops(queries, keys, d)
    assert product == batch_heads * 2 * queries * keys * d
    assert accounting.attention_flops(batch_heads, queries, keys, d, False, "forward") == 2 * product
    assert accounting.attention_flops(batch_heads, queries, keys, d, False, "backward") == 5 * product


@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (7, 30), (30, 7), (1, 5), (5, 1)])
def test_a_causal_mask_is_from_the_top_left(queries, keys):
    """What is seen, the diagonal counted half: of a square that is half of it."""
    seen = sum(min(i + 1, keys) for i in range(queries)) - min(queries, keys) / 2
    assert accounting.attention_exps(3, queries, keys, True, "end_to_end") == 2 * 3 * seen
    assert accounting.attention_flops(3, queries, keys, 16, True, "end_to_end") == 7 * 3 * 2 * 16 * seen


def test_attention_bytes_are_those_of_the_tensors():
    torch = pytest.importorskip("torch")
    batch_heads, queries, keys, d = 3, 8, 5, 16
    q = torch.empty(batch_heads, queries, d, dtype=torch.bfloat16)
    k = torch.empty(batch_heads, keys, d, dtype=torch.bfloat16)
    lse = torch.empty(batch_heads, queries)
    forward = sum(t.nbytes for t in (q, k, k, q, lse))
    backward = sum(t.nbytes for t in (q, k, k, q, q, lse, q, k, k))
    assert accounting.attention_bytes(batch_heads, queries, keys, d, 2, "forward") == forward
    assert accounting.attention_bytes(batch_heads, queries, keys, d, 2, "backward") == backward
    assert accounting.attention_bytes(batch_heads, queries, keys, d, 2, "end_to_end") == forward + backward


def test_exps_are_one_for_each_visible_pair_up_to_the_diagonal():
    n = 100
    visible = sum(key <= query for query, key in itertools.product(range(n), range(n)))
    assert accounting.attention_exps(1, n, n, True, "forward") == pytest.approx(visible, rel=1.1 / n)
    assert accounting.attention_exps(1, n, n, False, "end_to_end") == 2 * n * n
    assert accounting.exps_ms(16 * 132 * 1_000_000, sms=132, sm_mhz=1000) == pytest.approx(1.0)  # 16 a clock


def test_roofline_is_the_longer_of_the_two():
    assert accounting.roofline_ms(1e12, 0, tflops=1, tb_per_s=1) == pytest.approx(1000)
    assert accounting.roofline_ms(0, 1e12, tflops=1, tb_per_s=1) == pytest.approx(1000)
    for unknown in ((math.nan, 1), (1, math.nan)):
        assert math.isnan(accounting.roofline_ms(1e12, 1e12, *unknown))
    ridge, copied = 990 / 3.35, accounting.roofline_ms(0, 1e9, 990, 3.35)
    for share, ms in ((0.5, copied), (1, copied), (2, 2 * copied)):
        assert accounting.roofline_ms(share * ridge * 1e9, 1e9, 990, 3.35) == pytest.approx(ms)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"'sideways'.*forward, backward, end_to_end"):
        accounting.attention_flops(1, 1, 1, 1, False, "sideways")
    with pytest.raises(ValueError, match="num_keys=0"):
        accounting.attention_bytes(1, 1, 0, 1, 2, "forward")
    with pytest.raises(ValueError, match="tflops=0"):
        accounting.roofline_ms(1, 1, 0, 1)


def test_peaks_by_full_name():
    for name, bf16, tb_per_s in (
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35), ("NVIDIA H100 PCIe", 756.0, 2.0), ("NVIDIA H200", 989.4, 4.8),
        ("NVIDIA A100-SXM4-40GB", 312.0, 1.555), ("NVIDIA A100 80GB PCIe", 312.0, 1.935), ("Tesla T4", None, 0.32),
        ("NVIDIA GeForce RTX 4090", 165.2, 1.008),
    ):  # fmt: skip
        found = accounting.peaks(name)
        assert found.tflops.get("bf16") == bf16 and found.tb_per_s == tb_per_s
    laptop, part = "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert [accounting.peaks(name) for name in ("", laptop, part, "NVIDIA H100", "Z9000")] == [
        None
    ] * 5  # no guess
    t4 = accounting.peaks("Tesla T4")
    assert t4.roofline_ms(65e9, 0, "fp16") == pytest.approx(1.0) and t4.roofline_ms(65e9, 0, "bf16") is None
