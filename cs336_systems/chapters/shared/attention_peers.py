"""No table: the implementations of attention that chapters time, ours and others', built alike, their inputs and calls.

    build("sdpa_cudnn", is_causal=True, device="cuda", seq_len=4096).apply(q, k, v)
    build("fa4", True, "cuda", 32768, window=1024).apply(q, k, v)

Ours are those of `attention.registry`; the others are listed in MAKERS, here and nowhere else. What models ask for
beside a causal mask (grouped queries, a window, packed documents) each is asked for in its own words, never emulated by
repeated keys or a stored mask.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.attention.registry import FEATURES, IMPLEMENTATIONS, availability
from cs336_systems.ladder import steps
from cs336_systems.measure.device import torch_dtype
from cs336_systems.store.machine import cpp_compiler, has_module
from cs336_systems.store.status import Skip

if TYPE_CHECKING:
    import torch

OURS = ("flash_triton", "plain_triton")
WORK = tuple(steps.WORK.values())  # the leaderboard's heads, tokens, head dimension
# steps of the ladder that make both passes, whatever kernels the package itself chooses for a GPU
PORTABLE = ("f_production", "b_production")


# ------------------------------------------------------------------------------------------------ cases
@dataclass(frozen=True)
class Case:
    """One pass of `impl` on `heads` × (seq_len, head_dim), batch 1. `repeat` 1 measures the same thing again."""

    impl: str
    part: str
    heads: int
    seq_len: int
    head_dim: int
    is_causal: bool
    dtype: str
    repeat: int = 0


def with_pair(make: Callable[..., Any], impls: Any, *rest: Any, again: str = "flash_triton") -> list[Any]:
    """The cases of a group, `make(impl, *rest)`, and one of them again (A/A)."""
    return [make(impl, *rest) for impl in impls] + [make(again, *rest, repeat=1)]


def data_of(case: Any, device: str, grad_o: str = "matrix") -> list[torch.Tensor]:
    """q, k, v and dO of a case: (heads, n, d) each, the same for all that are compared. `grad_o`: random numbers, or
    ("number") a one with strides of zero."""
    import torch

    generator = torch.Generator(device).manual_seed(case.seq_len + case.head_dim)
    shape, dtype = (4, case.heads, case.seq_len, case.head_dim), torch_dtype(case.dtype)
    data = list(torch.randn(shape, generator=generator, device=device, dtype=dtype))
    if grad_o == "number":
        data[3] = torch.ones((), device=device, dtype=dtype).expand(shape[1:])
    return data


# ------------------------------------------------------------------------------------------------ implementations
@dataclass(frozen=True)
class Attention:
    """An implementation, ready to be called. `apply`: (q, k, v) → o on (..., heads, tokens, d), or (..., tokens, heads,
    d) with `tokens_first`. `backend`: what runs behind it; `backward`: whether it has a backward pass."""

    apply: Callable[..., Any]
    backend: str
    tokens_first: bool = False
    backward: bool = True

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """(heads, n, d) on the axes of `apply`, contiguous and a leaf of its own; an expanded scalar stays one."""
        x = x.transpose(0, 1) if self.tokens_first else x.detach()
        return x.contiguous() if any(x.stride()) else x


Made = tuple[Callable[..., Any], str]


@dataclass(frozen=True)
class Asked:
    """What an implementation is built for: what `build` is given."""

    is_causal: bool
    device: str
    seq_len: int
    grouped: bool
    window: int
    lengths: tuple[int, ...]

    @property
    def features(self) -> dict[str, Any]:
        """Those of `attention.registry.FEATURES` that are asked for, as `attention` takes them."""
        given = {"enable_gqa": self.grouped, "window": self.window}
        given = {name: value for name, value in given.items() if value}
        return given | ({"cu_seqlens": self.cu_seqlens()} if self.lengths else {})

    def cu_seqlens(self) -> torch.Tensor:
        """Where documents begin, and the end: (documents + 1,), int32."""
        import torch

        ends = [0, *itertools.accumulate(self.lengths)]
        return torch.tensor(ends, dtype=torch.int32, device=self.device)


@functools.cache
def build(
    impl: str, is_causal: bool, device: str, seq_len: int, grouped: bool = False, window: int = 0,
    lengths: tuple[int, ...] = (),
) -> Attention:  # fmt: skip
    """One of MAKERS. `seq_len` is for masks that are made beforehand, and for compilers that look at shapes.

    `grouped`: k and v have fewer heads than q, on the axis before the last two. `window`: keys that a query sees, 0 for
    all up to its own. `lengths`: of documents, packed into tensors (1, heads, their sum, d); none where there are none.

    Raises `Skip` where this machine cannot run it and for what it does not serve, ValueError for an unknown name
    and for windows or documents without a causal mask.
    """
    if impl not in MAKERS:
        raise ValueError(f"unknown impl {impl!r}; allowed: {', '.join(MAKERS)}")
    peer = MAKERS[impl]
    if device == "cpu" and peer.for_gpus:  # the interpreter is for tests; its time says nothing
        raise Skip("needs a CUDA device")
    if (window or lengths) and not is_causal:
        raise ValueError(
            f"is_causal={is_causal}, window={window}, lengths={lengths}; windows and documents are causal"
        )
    asked = Asked(is_causal, device, seq_len, grouped, window, lengths)
    if lacking := [FEATURES[name] for name in asked.features if name not in peer.serves]:
        raise Skip(f"does not serve {', '.join(lacking)}")
    return peer.built(asked)


# Each of these makes `apply` and `backend` of an `Attention`.
def _own(impl: str, asked: Asked) -> Made:
    from cs336_systems.attention import attention

    if reason := availability()[impl]:
        raise Skip(f"needs another machine: {reason}")
    return functools.partial(attention, is_causal=asked.is_causal, impl=impl, **asked.features), "eager"


def _reference_compiled(asked: Asked) -> Made:
    import torch

    if asked.device == "cpu" and cpp_compiler() is None:
        raise Skip("needs a C++ compiler")
    if asked.device != "cpu" and not has_module("triton"):
        raise Skip("needs triton")
    plain, _ = _own("reference", asked)
    return torch.compile(plain, fullgraph=True, dynamic=False), "inductor"


def _on_four_axes(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v: apply(q, k, v) if q.ndim == 4 else apply(q[None], k[None], v[None])[0]


def _sdpa(name: str, asked: Asked) -> Made:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cs336_systems.attention import attention

    backend = getattr(SDPBackend, name)

    def forced(q, k, v):
        with sdpa_kernel(backend):  # an error where it cannot run, never another kernel
            return attention(q, k, v, asked.is_causal, impl="sdpa", enable_gqa=asked.grouped)

    return _on_four_axes(forced), name.lower()


def _flex(asked: Asked) -> Made:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, document, mask = asked.window, None, None
    if asked.lengths:
        numbers = torch.arange(len(asked.lengths), device=asked.device)
        document = numbers.repeat_interleave(torch.tensor(asked.lengths, device=asked.device))

    def sees(b, h, i, j):
        seen = i >= j
        if window:
            seen = seen & (i - j < window)
        return seen if document is None else seen & (document[i] == document[j])

    if asked.is_causal:
        mask = create_block_mask(sees, None, None, asked.seq_len, asked.seq_len, device=asked.device)
    flex = torch.compile(flex_attention, dynamic=False)
    call = functools.partial(flex, block_mask=mask, enable_gqa=asked.grouped)
    return _on_four_axes(call), "inductor"


def _portable(asked: Asked) -> Made:
    from cs336_systems.ladder import function, launch

    for name in PORTABLE:
        if reason := launch.missing(steps.STEPS[name]):
            raise Skip(f"needs {reason}")

    def portable(q, k, v):
        return function.LadderAttention.apply(q, k, v, asked.is_causal, *PORTABLE)

    return portable, "+".join(PORTABLE)


def _flash_attn(package: Any, asked: Asked) -> Callable[..., Any]:
    """What FlashAttention's packages all call alike, on (batch, tokens, heads, d). Keys may have fewer heads; their
    window counts the keys before a query's own."""
    options: dict[str, Any] = {"causal": asked.is_causal}
    if asked.window:
        options["window_size"] = (asked.window - 1, 0)
    if not asked.lengths:
        return _first(functools.partial(package.flash_attn_func, **options))
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), asked.cu_seqlens())
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(asked.lengths))
    return _on_three_axes(_first(functools.partial(package.flash_attn_varlen_func, **options)))


def _first(call: Callable[..., Any]) -> Callable[..., Any]:
    def first(q, k, v):
        found = call(q, k, v)
        return found[0] if isinstance(found, tuple) else found

    return first


def _on_three_axes(apply: Callable[..., Any]) -> Callable[..., Any]:
    # squeezed, not indexed, whose gradient would be a copy
    return lambda q, k, v: apply(*(x.squeeze(0) for x in (q, k, v))).unsqueeze(0)


def _package(module: str, package: str, called: str, asked: Asked) -> Made:
    """One of FlashAttention's packages, by the module to import."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise Skip(f"needs the package {package} ({error})") from None
    forward = _on_four_axes(_flash_attn(found, asked))
    return forward, f"{called} {importlib.metadata.version(package)}"


def _varlen(asked: Asked) -> Made:
    from torch.nn.attention.varlen import varlen_attn

    if not asked.lengths:
        raise Skip("is asked for packed sequences alone")
    ends, longest = asked.cu_seqlens(), max(asked.lengths)
    asks = {"window_size": bool(asked.window), "enable_gqa": asked.grouped}
    known = inspect.signature(varlen_attn).parameters
    if missing := [word for word, wanted in asks.items() if wanted and word not in known]:
        raise Skip(f"varlen_attn of this torch knows no {' and no '.join(missing)}")
    # without a window (-1, 0): causal
    options: dict[str, Any] = (
        {"window_size": (asked.window - 1, 0)} if "window_size" in known else {"is_causal": True}
    )
    options |= {"enable_gqa": True} if asked.grouped else {}

    packed = lambda q, k, v: varlen_attn(q, k, v, ends, ends, longest, longest, **options)
    return _on_three_axes(packed), "torch varlen_attn"


@dataclass(frozen=True)
class Peer:
    """How an implementation is made, which of FEATURES it `serves`, and whether it runs on GPUs only; the rest is as in
    `Attention`."""

    make: Callable[[Asked], Made]
    serves: tuple[str, ...] = ()
    for_gpus: bool = True
    tokens_first: bool = False
    backward: bool = True

    def built(self, asked: Asked) -> Attention:
        import torch

        apply, backend = self.make(asked)
        apply = apply if self.backward else torch.no_grad()(apply)
        return Attention(apply, backend, self.tokens_first, self.backward)


_FA4 = functools.partial(_package, "flash_attn.cute", "flash-attn-4", "flash_attn.cute")
_FA3 = functools.partial(_package, "fa3_fwd_interface", "fa3-fwd", "fa3-fwd")
_OWN_FOR_GPUS, _ALL = ("flash_triton", "flash_cuda"), tuple(FEATURES)
MAKERS: dict[str, Peer] = {
    **{
        name: Peer(functools.partial(_own, name), found.features, name in _OWN_FOR_GPUS)
        for name, found in IMPLEMENTATIONS.items()
    },
    "plain_triton": Peer(_portable),
    "reference_compiled": Peer(_reference_compiled, for_gpus=False),
    "sdpa_flash": Peer(functools.partial(_sdpa, "FLASH_ATTENTION"), ("enable_gqa",), for_gpus=False),
    "sdpa_cudnn": Peer(functools.partial(_sdpa, "CUDNN_ATTENTION"), ("enable_gqa",)),
    "sdpa_efficient": Peer(functools.partial(_sdpa, "EFFICIENT_ATTENTION")),
    "flex_compiled": Peer(_flex, _ALL),
    "fa4": Peer(_FA4, _ALL, tokens_first=True),
    "fa3": Peer(_FA3, _ALL, tokens_first=True, backward=False),  # its package has no backward pass
    "varlen": Peer(_varlen, _ALL, tokens_first=True),
}
TOKENS_FIRST = tuple(name for name, peer in MAKERS.items() if peer.tokens_first)
FORWARD_ONLY = tuple(name for name, peer in MAKERS.items() if not peer.backward)


def one_pass(impl: Attention, part: str, data: list[torch.Tensor]) -> Callable[[], Any]:
    """A call of one pass, or both, on q, k, v and dO (heads, n, d)."""
    import torch

    *inputs, grad_o = (impl.laid_out(x) for x in data)
    made: list[Any] = []  # they belong to the stream of the first call, which a graph captures

    def call():
        if not made:
            leaves = [x.clone().requires_grad_() for x in inputs]
            made.extend([leaves, impl.apply(*leaves) if part == "backward" else None])
        leaves, output = made
        if part == "forward":
            return impl.apply(*leaves)
        if output is not None:
            return torch.autograd.grad(output, leaves, grad_o, retain_graph=True)
        return torch.autograd.grad(impl.apply(*leaves), leaves, grad_o)

    return call


def errors(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    """‖x − exact‖ / ‖exact‖ of each."""
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]


# ------------------------------------------------------------------------------------------------ what is launched
def own_kernels(call: Callable[[], Any]) -> list[str]:
    """The kernels of this package that a call launches, as `module.name`."""
    from cs336_systems.ladder.resources import of_call

    return [r.kernel for r in of_call(call) if r.kernel.split(".")[0] in ("triton", "hopper")]
