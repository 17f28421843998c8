"""What peers of attention are asked for beside a causal mask: each in its own words, and the same of all."""

from __future__ import annotations

import functools
import types

import pytest

from cs336_systems.chapters.leaderboard import models
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.store.status import Skip

torch = pytest.importorskip("torch")
TOKENS, LENGTHS = 70, (9, 1, 40, 20)
ASKED = {"plain": {}, "grouped": {"grouped": True}, "window": {"window": 9}, "packed": {"lengths": LENGTHS},
         "all": {"grouped": True, "window": 9, "lengths": LENGTHS}}  # fmt: skip
each_asked = pytest.mark.parametrize("name", ASKED)


def asked(name):
    return peers.Asked(True, "cpu", TOKENS, **{"grouped": False, "window": 0, "lengths": ()} | ASKED[name])


def tensors(name):
    batch, kv_heads = (1 if "lengths" in ASKED[name] else 2), (2 if "grouped" in ASKED[name] else 4)
    shapes = [(batch, heads, TOKENS, 16) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def agree(impl, name):
    """Whether output and gradients are those of the specification."""
    q, k, v = tensors(name)
    flip = (lambda x: x.transpose(1, 2)) if impl.tokens_first else (lambda x: x)
    found, exact = (
        [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]
        for o in (
            flip(impl.apply(*map(flip, (q, k, v)))),
            peers.MAKERS["reference"].built(asked(name)).apply(q, k, v),
        )
    )
    assert max(peers.errors(found, exact)) < 1e-5


def packages_attention(q, k, v, causal=False, window_size=(-1, -1), ends=None):
    """As FlashAttention's packages define it, on (batch, tokens, heads, d): the window counts keys beside a query's."""
    i = torch.arange(q.shape[1])
    distance = i[:, None] - i
    seen = (distance >= 0) | (not causal)
    if window_size[0] >= 0:
        seen &= (distance <= window_size[0]) & (-distance <= window_size[1])
    if ends is not None:
        number = torch.bucketize(i, ends, right=True)
        seen &= number[:, None] == number
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return o.transpose(1, 2)


def packages_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **rest):
    assert q.ndim == 3 and cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == max(cu_seqlens_q.diff())
    return packages_attention(q[None], k[None], v[None], ends=cu_seqlens_q, **rest)[0], None


@each_asked
def test_flash_attention_is_asked_for_the_same(name):
    package = types.SimpleNamespace(
        flash_attn_func=packages_attention, flash_attn_varlen_func=packages_varlen
    )
    agree(peers.Attention(peers._flash_attn(package, asked(name)), "", tokens_first=True), name)


@pytest.mark.parametrize("name", ["packed", "all"])
def test_varlen_attn_is_asked_for_the_same(name, monkeypatch):
    from torch.nn.attention import varlen

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
        assert enable_gqa == (q.shape[1] != k.shape[1])
        size = {"causal": True} if window_size == (-1, 0) else {"window_size": window_size}
        return packages_varlen(q, k, v, cu_q, cu_k, max_q, max_k, **size)[0]

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    agree(peers.MAKERS["varlen"].built(asked(name)), name)
    with pytest.raises(Skip, match="packed sequences alone"):
        peers.MAKERS["varlen"].built(asked("window"))

    # as it is in torch 2.11, and before
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *args, window_size: varlen_attn(*args, window_size=window_size)
    )
    agree(peers.MAKERS["varlen"].built(asked("packed")), "packed")
    with pytest.raises(Skip, match="knows no enable_gqa"):
        peers.MAKERS["varlen"].built(asked("all"))
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *args, is_causal: varlen_attn(*args, window_size=(-1, 0))
    )
    agree(peers.MAKERS["varlen"].built(asked("packed")), "packed")
    with pytest.raises(Skip, match="knows no window_size and no enable_gqa"):
        peers.MAKERS["varlen"].built(asked("all"))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@each_asked
def test_flex_attention_is_asked_for_the_same(name, monkeypatch):
    """Without its compiler, which is not for CPUs' gradients."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    impl = peers.MAKERS["flex_compiled"].built(asked(name))
    q, k, v = (x.detach() for x in tensors(name))
    found, exact = impl.apply(q, k, v), peers.MAKERS["reference"].built(asked(name)).apply(q, k, v)
    assert max(peers.errors([found], [exact])) < 1e-5


def test_who_does_not_serve_it_is_not_asked():
    build = functools.partial(peers.build, is_causal=True, device="cpu", seq_len=TOKENS)
    with pytest.raises(Skip, match="does not serve sliding window, packed sequences"):
        build("sdpa_flash", grouped=True, window=9, lengths=LENGTHS)
    with pytest.raises(Skip, match="does not serve grouped queries"):
        build("reference_compiled", grouped=True)
    for impl in ("reference", "sdpa", "flash_torch"):
        agree(build(impl, grouped=True), "grouped")


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("part", models.PARTS)
@pytest.mark.parametrize("kind", models.KINDS)
def test_peers_agree_with_ours_on_a_gpu(kind, part):
    """Small shapes of every kind: what is captured in a graph and timed has the results of ours."""
    shapes = {
        models.KINDS[0]: (2, 8, 2, 512, 128, True, 0, "none"), models.KINDS[1]: (1, 4, 2, 2048, 64, True, 300, "none"),
        models.KINDS[2]: (1, 4, 4, 2048, 64, True, 0, "50-400"), models.KINDS[3]: (2, 2, 2, 512, 192, True, 0, "none"),
    }  # fmt: skip
    impls = [i for i in models.PEERS[kind] if part == "forward" or i not in peers.FORWARD_ONLY]
    cases = [models.Case(impl, part, *shapes[kind], "bf16") for impl in impls]
    assert {models.kind_of(case) for case in cases} == {kind}
    for case, metrics in zip(cases, models.run_group(cases), strict=True):
        if metrics.get("status", "").startswith("skipped: "):
            continue
        assert "status" not in metrics, (case.impl, metrics["status"])
        assert metrics["ms_p50"] > 0 and metrics["apart"] < 2e-2, case.impl
