"""No table: the implementations of attention that chapters time, ours and others', built alike, their inputs and calls.

    build("sdpa_cudnn", is_causal=True, device="cuda", seq_len=4096).apply(q, k, v)
    build("fa4", True, "cuda", 32768, window=1024).apply(q, k, v)

Ours are those of `attention.registry`; the others are listed in MAKERS, here and nowhere else. What models ask for
beside a causal mask (grouped queries, a window, packed documents) each is asked for in its own words, never emulated by
repeated keys or a stored mask; SERVES says who serves what.
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
    if device == "cpu" and impl in FOR_GPUS:  # the interpreter is for tests; its time says nothing
        raise Skip("needs a CUDA device")
    if (window or lengths) and not is_causal:
        raise ValueError(
            f"is_causal={is_causal}, window={window}, lengths={lengths}; windows and documents are causal"
        )
    asked = Asked(is_causal, device, seq_len, grouped, window, lengths)
    if lacking := [FEATURES[name] for name in asked.features if name not in SERVES.get(impl, ())]:
        raise Skip(f"does not serve {', '.join(lacking)}")
    return MAKERS[impl](asked)


def _own(impl: str, asked: Asked) -> Attention:
    from cs336_systems.attention import attention

    if reason := availability()[impl]:
        raise Skip(f"needs another machine: {reason}")
    apply = functools.partial(attention, is_causal=asked.is_causal, impl=impl, **asked.features)
    return Attention(apply, "eager")


def _reference_compiled(asked: Asked) -> Attention:
    import torch

    if asked.device == "cpu" and cpp_compiler() is None:
        raise Skip("needs a C++ compiler")
    if asked.device != "cpu" and not has_module("triton"):
        raise Skip("needs triton")
    plain = _own("reference", asked).apply
    return Attention(torch.compile(plain, fullgraph=True, dynamic=False), "inductor")


def _on_four_axes(apply: Callable[..., Any]) -> Callable[..., Any]:
    def on_four_axes(q, k, v):
        return apply(q, k, v) if q.ndim == 4 else apply(q[None], k[None], v[None])[0]

    return on_four_axes


def _sdpa(name: str, asked: Asked) -> Attention:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cs336_systems.attention import attention

    backend = getattr(SDPBackend, name)

    def forced(q, k, v):
        with sdpa_kernel(backend):  # an error where it cannot run, never another kernel
            return attention(q, k, v, asked.is_causal, impl="sdpa", enable_gqa=asked.grouped)

    return Attention(_on_four_axes(forced), name.lower())


def _flex(asked: Asked) -> Attention:
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
    return Attention(_on_four_axes(call), "inductor")


def _portable(asked: Asked) -> Attention:
    from cs336_systems.ladder import function, launch

    for name in PORTABLE:
        if reason := launch.missing(steps.STEPS[name]):
            raise Skip(f"needs {reason}")

    def portable(q, k, v):
        return function.LadderAttention.apply(q, k, v, asked.is_causal, *PORTABLE)

    return Attention(portable, "+".join(PORTABLE))


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
    def on_three_axes(q, k, v):  # squeezed, not indexed, whose gradient would be a copy
        return apply(*(x.squeeze(0) for x in (q, k, v))).unsqueeze(0)

    return on_three_axes


def _fa4(asked: Asked) -> Attention:
    try:
        import flash_attn.cute as fa4
    except ImportError as error:
        raise Skip(f"needs FlashAttention-4, the package flash-attn-4 ({error})") from None

    version = importlib.metadata.version("flash-attn-4")
    forward = _on_four_axes(_flash_attn(fa4, asked))
    return Attention(forward, f"flash_attn.cute {version}", tokens_first=True)


def _fa3(asked: Asked) -> Attention:
    import torch

    try:
        import fa3_fwd_interface as fa3
    except ImportError as error:
        raise Skip(f"needs FlashAttention-3's forward, the package fa3-fwd ({error})") from None

    version = importlib.metadata.version("fa3-fwd")
    forward = torch.no_grad()(_on_four_axes(_flash_attn(fa3, asked)))
    return Attention(forward, f"fa3-fwd {version}", tokens_first=True, backward=False)


def _varlen(asked: Asked) -> Attention:
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

    def packed(q, k, v):
        return varlen_attn(q, k, v, ends, ends, longest, longest, **options)

    return Attention(_on_three_axes(packed), "torch varlen_attn", tokens_first=True)


MAKERS: dict[str, Callable[[Asked], Attention]] = {
    **{name: functools.partial(_own, name) for name in IMPLEMENTATIONS},
    "plain_triton": _portable,
    "reference_compiled": _reference_compiled,
    "sdpa_flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa_efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "flex_compiled": _flex,
    "fa4": _fa4,
    "fa3": _fa3,
    "varlen": _varlen,
}
SERVES: dict[str, tuple[str, ...]] = {  # of FEATURES
    **{name: found.features for name, found in IMPLEMENTATIONS.items()},
    **dict.fromkeys(("sdpa_flash", "sdpa_cudnn"), ("enable_gqa",)),
    **dict.fromkeys(("flex_compiled", "fa4", "fa3", "varlen"), tuple(FEATURES)),
}
FOR_GPUS = (
    "flash_triton",
    "flash_cuda",
    "plain_triton",
    "sdpa_cudnn",
    "sdpa_efficient",
    "flex_compiled",
    "fa4",
    "fa3",
    "varlen",
)
TOKENS_FIRST = ("fa4", "fa3", "varlen")
FORWARD_ONLY = ("fa3",)  # whose package has no backward pass


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
