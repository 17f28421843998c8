"""No table: the implementations of attention that chapter `leaderboard` measures, ours and others', alike, their inputs
and calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.ladder import steps
from cs336_systems.store.status import Skip

if TYPE_CHECKING:
    import torch

OURS = ("flash_triton", "plain_triton")
PEERS = ("fa4", "sdpa_cudnn", "flex_compiled", "sdpa_flash", "sdpa_efficient", "reference", "flash_torch")
WORK = tuple(steps.WORK.values())  # the leaderboard's heads, tokens, head dimension
_SDPA = {
    "sdpa_cudnn": "CUDNN_ATTENTION",
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
}
# implementations that are steps of the ladder, whatever kernels the package itself chooses for a GPU
_PAIRS = {"plain_triton": ("f_production", "b_production")}


_TRITON = (
    "cs336_systems.attention",
    "cs336_systems.attention.usable",
    "cs336_systems.attention.flash_triton",
)
_TORCH = ("cs336_systems.attention.flash_torch",)
_LADDER = ("cs336_systems.ladder.function", "cs336_systems.ladder.launch", "cs336_systems.ladder.steps")
# what chooses between implementations of attention, and the chosen: a row depends on its own alone (`store.code`)
PER_CASE = _TRITON + _TORCH + _LADDER


def sources(impl: str) -> tuple[str, ...]:
    """What an implementation of attention (or a step of the ladder) is in this package: for `also_measures`."""
    if impl in ("flex_compiled", "fa4"):
        return ()
    inputs = "cs336_systems.attention.inputs:autocast_inputs"
    if impl in ("reference", "reference_compiled"):
        return inputs, "cs336_systems.attention.reference:reference_attention"
    if impl.startswith("sdpa"):
        return inputs, "cs336_systems.attention:attention"
    if impl in ("flash_torch", "flash_compiled_backward"):
        return "cs336_systems.attention:attention", *_TORCH
    return _TRITON if impl in ("flash_triton", "auto") else _TRITON + _LADDER


def also_measures(case: Any) -> tuple[str, ...]:
    """A case's attention, or its step of the ladder."""
    return sources(case.impl)


# ------------------------------------------------------------------------------------------------ cases
def with_pair(make: Callable[..., Any], impls: Any, *rest: Any, again: str = "flash_triton") -> list[Any]:
    """The cases of a group, `make(impl, *rest)`, and one of them again (A/A)."""
    return [make(impl, *rest) for impl in impls] + [make(again, *rest, repeat=1)]


def torch_dtype(name: str) -> torch.dtype:
    """The type that a case's `dtype` names."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


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
class Implementation:
    """`apply`: (q, k, v) → o on three axes, (heads, tokens, d), or (tokens, heads, d) with `tokens_first`.
    `backend`: what runs behind it."""

    apply: Callable[..., Any]
    backend: str
    tokens_first: bool = False

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """(heads, n, d) on the axes of `apply`, contiguous and a leaf of its own; what is one number stays one."""
        x = x.transpose(0, 1) if self.tokens_first else x.detach()
        return x.contiguous() if any(x.stride()) else x


def one_pass(impl: Implementation, part: str, data: list[torch.Tensor]) -> Callable[[], Any]:
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


@functools.cache
def build(impl: str, is_causal: bool, device: str, seq_len: int, compiled: bool) -> Implementation:
    """One of OURS or PEERS. `compiled`: under `torch.compile`, as the leaderboard runs ours; `seq_len` is for masks
    that are made beforehand. Raises `Skip` where this machine cannot run it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cs336_systems.attention import attention, availability

    if impl == "reference":
        return Implementation(lambda q, k, v: attention(q, k, v, is_causal, impl="reference"), "eager")
    if impl == "flash_torch":
        return Implementation(lambda q, k, v: attention(q, k, v, is_causal, impl="flash_torch"), "eager")
    if impl in _SDPA:
        if device == "cpu" and impl != "sdpa_flash":
            raise Skip(f"needs a CUDA device: torch has no {impl} on a CPU")
        backend = getattr(SDPBackend, _SDPA[impl])

        def forced(q, k, v):
            with sdpa_kernel(backend):  # an error where it cannot run, never another kernel
                return attention(q[None], k[None], v[None], is_causal, impl="sdpa")[0]

        return Implementation(forced, backend.name.lower())
    if device == "cpu":
        raise Skip("needs a CUDA device")
    if impl == "flash_triton":
        if reason := availability()["flash_triton"]:
            raise Skip(f"needs triton on an NVIDIA GPU: {reason}")
        from cs336_systems.attention.flash_triton import FlashAttentionTriton

        # compiled as the leaderboard asks; alone on the GPU it makes no difference, and shapes change there
        flash = torch.compile(FlashAttentionTriton.apply) if compiled else FlashAttentionTriton.apply
        return Implementation(lambda q, k, v: flash(q, k, v, is_causal), "package")
    if impl in _PAIRS:
        return _pair(impl, is_causal, compiled)
    if impl == "flex_compiled":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        if is_causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq_len, seq_len, device=device)
        flex = torch.compile(flex_attention, dynamic=False)
        return Implementation(lambda q, k, v: flex(q[None], k[None], v[None], block_mask=mask)[0], "inductor")
    return _fa4(is_causal)


def _pair(impl: str, is_causal: bool, compiled: bool) -> Implementation:
    import torch

    from cs336_systems.ladder import function, launch

    for name in _PAIRS[impl]:
        if reason := launch.missing(steps.STEPS[name]):
            raise Skip(f"needs {reason}")

    def pair(q, k, v):
        return function.LadderAttention.apply(q, k, v, is_causal, *_PAIRS[impl])

    return Implementation(torch.compile(pair) if compiled else pair, "+".join(_PAIRS[impl]))


def _fa4(is_causal: bool) -> Implementation:
    try:
        import flash_attn.cute as fa4
    except ImportError as error:
        raise Skip(f"needs FlashAttention-4, the package flash-attn-4 ({error})") from None

    def forward(q, k, v):
        found = fa4.flash_attn_func(q[None], k[None], v[None], causal=is_causal)
        return (found[0] if isinstance(found, tuple) else found)[0]

    return Implementation(
        forward, f"flash_attn.cute {getattr(fa4, '__version__', '')}".strip(), tokens_first=True
    )


# ------------------------------------------------------------------------------------------------ what is launched
def own_kernels(call: Callable[[], Any]) -> list[str]:
    """The kernels of this package that a call launches, as `module.name`."""
    from cs336_systems.ladder.resources import of_call

    return [r.kernel for r in of_call(call) if r.kernel.split(".")[0] in ("triton_kernels", "hopper")]
