"""What every implementation of attention accepts, and the errors for what it does not."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
_has_storage, _dispatch_modes = torch._C._has_storage, torch._C._len_torch_dispatch_stack


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES,
    head_dims: tuple[int, int] = (MIN_HEAD_DIM, MAX_HEAD_DIM), enable_gqa: bool = False,
) -> None:  # fmt: skip
    """Raises ValueError unless q (..., n_q, d), k and v (..., n_k, d) fit together, naming what differs.

    enable_gqa: the axis before the last two is of heads, and k and v may have fewer, of which q's are a multiple."""
    shape, dtype, device = q.shape, q.dtype, q.device
    if (
        shape == k.shape == v.shape
        and dtype == k.dtype == v.dtype
        and device == k.device == v.device
        and len(shape) >= 2
        and dtype in dtypes
        and head_dims[0] <= shape[-1] <= head_dims[1]
        and 0 not in shape
    ):  # the common case, in as few checks as possible: this runs at every call
        return
    if q.ndim < 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., n_queries, d), at least two axes")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} but v has {tuple(v.shape)}; they must be equal")
    _check_leading_axes(q, k, enable_gqa)
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dimension {q.shape[-1]} but k has {k.shape[-1]}; they must be equal")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; they must have one dtype")
    if q.dtype not in dtypes:
        raise ValueError(f"q is {q.dtype}; allowed: {', '.join(map(str, dtypes))}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}; they must be on one device")
    if not head_dims[0] <= q.shape[-1] <= head_dims[1]:
        raise ValueError(f"the head dimension is {q.shape[-1]}; allowed: {head_dims[0]} to {head_dims[1]}")
    if q.numel() == 0 or k.numel() == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}; every axis must be at least 1")


def _check_leading_axes(q: torch.Tensor, k: torch.Tensor, enable_gqa: bool) -> None:
    if k.ndim == q.ndim and q.shape[:-2] == k.shape[:-2]:
        return
    shapes = f"q has shape {tuple(q.shape)} but k has {tuple(k.shape)}"
    alike = k.ndim == q.ndim > 2 and q.shape[:-3] == k.shape[:-3]
    multiple = alike and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0
    if not enable_gqa:
        hint = " (with enable_gqa=True heads of queries share keys)" if multiple else ""
        raise ValueError(f"{shapes}; their leading axes must be equal{hint}")
    if not multiple:
        raise ValueError(
            f"{shapes}; with enable_gqa=True the heads of q, on the axis before the last two, must be a multiple of "
            "those of k, and the axes before be equal"
        )


def check_seen(
    q: torch.Tensor, k: torch.Tensor, is_causal: bool, window: int | None, cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> None:  # fmt: skip
    """Raises ValueError unless a window, the ends of documents and the longest one's length, None where there are none,
    fit q and k as `attention` says. What cu_seqlens holds is looked at on the CPU only: a GPU would have to be waited
    for."""
    for name, value in (("window", window), ("cu_seqlens", cu_seqlens)):
        if value is not None and not is_causal:
            raise ValueError(f"{name} is given, and is_causal=False; {name} needs is_causal=True")
    shapes = f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}"
    if q.ndim < 2 or k.ndim < 2:
        raise ValueError(f"{shapes}; expected (..., n, d), at least two axes")
    if window is not None:
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise ValueError(f"window is {window!r}; allowed: whole numbers from 1 on")
        if q.shape[-2] >= k.shape[-2] + window:
            raise ValueError(f"{shapes}; with window={window} the last queries see no key")
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen is {max_seqlen!r}, and cu_seqlens is not given")
        return
    if max_seqlen is not None and (
        not isinstance(max_seqlen, int | torch.SymInt) or isinstance(max_seqlen, bool) or max_seqlen < 1
    ):
        raise ValueError(f"max_seqlen is {max_seqlen!r}; allowed: whole numbers from 1 on")
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype != torch.int32:
        found = cu_seqlens.dtype if isinstance(cu_seqlens, torch.Tensor) else repr(cu_seqlens)
        raise ValueError(f"cu_seqlens is {found}; expected a tensor of torch.int32")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; expected (documents + 1,)")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, q on {q.device}; they must be on one device")
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != 1 or q.shape[2] != k.shape[2]:
        raise ValueError(f"{shapes}; with cu_seqlens both must be (1, heads, total, d)")
    if is_readable(cu_seqlens):
        _check_ends(cu_seqlens, q.shape[2], max_seqlen)


def check_made(q: torch.Tensor, o: torch.Tensor, grad_o: torch.Tensor) -> None:
    """Raises ValueError where O or its gradient is not what a forward pass over q makes: kernels take it for that."""
    for name, x in (("o", o), ("grad_o", grad_o)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            of_x, of_q = (f"{y.dtype} {tuple(y.shape)} on {y.device}" for y in (x, q))
            raise ValueError(f"{name} is {of_x}; expected what q is, {of_q}")


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether nothing intercepts a call on these tensors: no tracing, no FLOP counter or other dispatch mode, no
    subclass, no sign in a flag (`torch.Tensor.is_neg`), none that stands for many under vmap and has no memory itself.
    """
    if is_compiling() or _dispatch_modes():  # compiling first: the compiler cannot trace the other
        return False
    return all([type(x) is torch.Tensor and _has_storage(x) and not x.is_neg() for x in tensors])


def is_readable(x: torch.Tensor) -> bool:
    """Whether the host can look at x's numbers without waiting, and without a trace that would keep them."""
    return is_plain(x) and x.is_cpu


def _check_ends(cu_seqlens: torch.Tensor, total: int, max_seqlen: int | None) -> None:
    first, last = cu_seqlens[0].item(), cu_seqlens[-1].item()
    if first != 0 or last != total:
        raise ValueError(f"cu_seqlens begins with {first} and ends with {last}; expected 0 and total={total}")
    lengths = cu_seqlens.diff()
    if (lengths < 0).any():
        i = int((lengths < 0).nonzero()[0])
        raise ValueError(f"cu_seqlens falls from {cu_seqlens[i]} to {cu_seqlens[i + 1]}; it must never fall")
    if max_seqlen is not None and (longest := lengths.max()) > max_seqlen:
        raise ValueError(f"max_seqlen is {max_seqlen}; a document has {longest} tokens")


def repeated_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and k and v with a head for each of q's: what grouped queries mean. Errors as for `check_inputs`."""
    if not enable_gqa or k.shape != v.shape:  # these are refused later
        return q, k, v
    _check_leading_axes(q, k, True)
    group = q.shape[-3] // k.shape[-3]
    return q, k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast, floating-point inputs in autocast's dtype, as for torch's own attention; else unchanged."""
    device = "cuda" if tensors[0].is_cuda else tensors[0].device.type  # the name of a type is slow to get
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def to_four_axes(x: torch.Tensor) -> torch.Tensor:
    """(..., n, d) as (batch, heads, n, d): a view for up to four axes, and for more where the strides allow one."""
    if x.ndim == 4:
        return x
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x.reshape(-1, *x.shape[-3:])


def first_order_only(name: str) -> None:
    """Called by a backward pass that cannot be differentiated itself; without this its gradients would be wrong.

    RuntimeError where autograd is recording the backward pass (`create_graph=True`).
    """
    if torch.is_grad_enabled() and not is_compiling():
        raise RuntimeError(
            f"{name} has no second-order gradients (create_graph=True); use impl='reference' for them"
        )
