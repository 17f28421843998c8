"""What a GPU kernel is for, by its name: its class, and a name short enough for a table.

The names are C++ signatures as Nsight Systems or torch's profiler demangle them, names that a library has given, and
those of Triton functions. The two tools spell the same kernel differently: `<unnamed>::` and `(anonymous namespace)::`,
`(int)4` and `4`, `[lambda(float) (instance 1)]` and `{lambda(float)#1}`, parameters `(T1::Params)` and in full.
"""

from __future__ import annotations

import functools
import re

PRODUCT, ATTENTION, SOFTMAX, ELEMENTWISE = "matrix product", "attention", "softmax", "elementwise"
REDUCTION, CAST, MEMORY, OPTIMIZER = "reduction", "copy/cast", "memcpy/memset", "optimizer"
INDEX, FUSED, COMMUNICATION, OTHER = "embedding/index", "Triton, fused", "communication", "other"
CLASSES = (
    PRODUCT, ATTENTION, SOFTMAX, ELEMENTWISE, REDUCTION, CAST, FUSED, OPTIMIZER, INDEX, MEMORY, COMMUNICATION, OTHER,
)  # fmt: skip

# The first row whose pattern is found anywhere in the name decides. The order matters: the types of a flash kernel
# mention cutlass, Inductor names a kernel after all that it fuses, an optimizer's kernel has functors of all kinds.
RULES: tuple[tuple[str, str], ...] = (
    # the transfers of the copy engines: Nsight Systems, torch's profiler
    (MEMORY, r"^\[CUDA mem|^Mem(cpy|set)\b"),
    (COMMUNICATION, r"nccl\w*Kernel"),
    # this project's kernels in Triton, Gluon and CUDA C++ (attention/, ladder/)
    (ATTENTION, r"^(bounds|forward|combine|alone|wide|prepare|finish|sum|few_queries|split(_gradient)?|delta|scale|"
                r"backward(_queries|_keys|_wide)?|before|queries|(single_)?keys|after)_kernel$"),
    # FlashAttention 2 and 3, PyTorch's memory-efficient kernels, cuDNN, FlexAttention in Inductor
    (ATTENTION, r"flash_(fwd|bwd)|FlashAttn|flash_attention|fmha_|_sdpa_|flex_attention"),
    # torch.optim with foreach=True or fused=True; gradient clipping uses these kernels as well
    (OPTIMIZER, r"multi_tensor_apply|FusedAdam|FusedSgd"),
    # Inductor: its matmul templates, and everything that it has fused
    (PRODUCT, r"^triton_(tem_fused_(\w*_)?)?(mm|bmm|addmm|baddbmm)(_|$)"),
    (FUSED, r"^triton_"),
    # cuBLAS and cuBLASLt (nvjet is their family for Hopper and later), CUTLASS, and split-K reductions
    (PRODUCT, r"nvjet|gemm|gemv|xmma|cutlass|cublas|splitK"),
    (SOFTMAX, r"(?i:softmax)"),
    # torch.flip is an index kernel that copies in another order
    (CAST, r"(?<!index_)copy_kernel|flip_kernel|CatArrayBatchedCopy|transpose_kernel|nchwToNhwc|nhwcToNchw"),
    # sorting is part of the backward pass of an embedding
    (INDEX, r"(?i:embedding)|index|Index|gather|scatter|RadixSort|MergeSort|krn_partial|compute_grad_weight|segment"),
    (REDUCTION, r"reduce|layer_norm|LayerNorm|rms_norm|RMSNorm|GammaBeta|cub::(\w+::)*\w*(Reduce|Scan)|cumsum"),
    (ELEMENTWISE, r"elementwise|triu_tril_kernel|distribution_|arange|nll_loss_backward|GeluCUDA"),
    # operators, for a machine without a GPU
    (ATTENTION, r"^aten::_?(scaled_dot_product|flash_attention|efficient_attention)"),
    (PRODUCT, r"^aten::(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|einsum|mv|addmv|dot|_scaled_mm)$"),
    (OPTIMIZER, r"^aten::_(foreach|fused)_"),
    (CAST, r"^aten::(copy|to|_to_copy|clone|contiguous|cat|stack|repeat)_?$"),
    (REDUCTION, r"^aten::(sum|mean|prod|var|std|a?max|a?min|argmax|argmin|(linalg_vector_)?norm|logsumexp|cumsum)$"),
    (REDUCTION, r"^aten::(native_|_fused_)?(layer|rms)_norm"),
    (INDEX, r"^aten::(nll_loss|select_backward|slice_backward|topk|sort|multinomial)"),
    (ELEMENTWISE, r"^aten::(add|r?sub|mul|div|pow|neg|exp|log|sin|cos|sqrt|rsqrt|reciprocal|abs|bitwise_not)_?$"),
    (ELEMENTWISE, r"^aten::(sigmoid|silu|relu|gelu|tanh|threshold)(_backward)?_?$"),
    (ELEMENTWISE, r"^aten::(where|masked_fill|fill|zero|lerp|addcmul|addcdiv|clamp|tril|triu|eq|ne|lt|le|gt|ge)_?$"),
)  # fmt: skip
_RULES = tuple((kind, re.compile(pattern)) for kind, pattern in RULES)


@functools.cache
def class_of(name: str) -> str:
    """The class of a GPU operation by its full name, one of `CLASSES`; operators of torch (`aten::mm`) have one too."""
    return next((kind for kind, pattern in _RULES if pattern.search(name)), OTHER)


# What a functor in a kernel's template arguments computes: the first that is found says it.
_FUNCTORS: tuple[tuple[str, str], ...] = (
    (r"FillFunctor", "fill"),
    (r"direct_copy_kernel", "copy"),
    (r"(\w+)_copy_kernel", r"copy: \1"),
    (r"([A-Z])UnaryFunctor<.*?(\w+)Functor\b", r"\2 by a number"),
    (r"CUDAFunctorOn(?:Self|Other)_(\w+)", r"\1 a number"),
    (r"CUDAFunctor_(\w+)", r"\1"),
    (r"BinaryFunctor<.*?(?<!Binary)\b(\w+)Functor\b", r"\1"),
    (r"\b(\w+?)_(?:tensor_)?(?:scalar_|backward_|tensor_)?kernel_impl", r"\1"),
    (r"::launch_(\w+?)(?:_scalar)?(?:_kernel)?\(", r"\1"),
    (r"::(?!gpu_|index_)(\w+?)(?:_scalar)?(?:_cuda)?_kernel(?:_cuda)?\(", r"\1"),
    (r"\b(\w+)Functor\b", r"\1"),
)
_REDUCTIONS: tuple[tuple[str, str], ...] = (
    (r"MeanOps", "mean"),
    (r"ArgM(ax|in)Ops", r"argm\1"),
    (r"M(ax|in)(?:Nan)?(?:Functor|Ops)", r"m\1"),
    (r"Norm(?:Two|One)?Ops", "norm"),
    (r"WelfordOps", "variance"),
    (r"sum_functor", "sum"),
    (r"(\w+)_functor", r"\1"),
)
_FOREACH: tuple[tuple[str, str], ...] = (
    (r"FusedAdam\w*", "fused Adam"),
    (r"Fused(\w+?)MathFunctor", r"fused \1"),
    (r"Pointwise\w*Functor.*std::multiplies", "foreach addcmul"),
    (r"Pointwise\w*Functor.*std::divides", "foreach addcdiv"),
    (r"LerpFunctor", "foreach lerp"),
    (r"LpNorm|NormFunctor", "foreach norm"),
    (r"Copy<|CopyFunctor", "foreach copy"),
    (r"std::plus", "foreach add"),
    (r"std::minus", "foreach sub"),
    (r"std::multiplies", "foreach mul"),
    (r"std::divides", "foreach div"),
    (r"at::native::(\w+)<\w+>", r"foreach \1"),
    (r"(?:non_finite_check_and_unscale)", "unscale gradients"),
)


@functools.cache
def short_name(name: str) -> str:
    """A kernel's name without types and parameters; what a functor computes is named, where the name tells it.

    `void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, …MulFunctor<float>>, …>(…)`
    becomes `elementwise: mul`; names that libraries have given stay, up to the size of the tile.
    """
    plain = name.replace("<unnamed>::", "").replace("(anonymous namespace)::", "")
    plain = re.sub(r"^(void |std::enable_if<.*?>::type )| \[clone [^\]]*\]$", "", plain.strip())
    if match := re.match(r"\[CUDA (memcpy|memset) ?([^\]]*)|(?:Mem(cpy|set)) ?\(?(\w*)", plain):
        kind, direction = match[1] or f"mem{match[3]}", match[2] or match[4] or ""
        return f"{kind} {_direction(direction)}" if kind == "memcpy" and direction else kind
    if "multi_tensor_apply" in plain:
        return _first(_FOREACH, plain) or "foreach"
    base, arguments = _split(plain)
    if re.search(r"elementwise_kernel(_manual_unroll)?$", base):
        if "flip_kernel" in arguments:
            return "copy: flip"
        if "index" in base:
            return "index_put" if "index_put" in arguments else "index"
        what = _first(_FUNCTORS, re.sub(r"\w*gpu_kernel_impl\w*", "", arguments))
        return what if what.startswith("copy") else f"elementwise: {what}" if what else base
    if base.endswith("reduce_kernel") and arguments.startswith("<"):
        what = _first(_REDUCTIONS, arguments)
        return f"reduction: {what}" if what else base
    if match := re.match(r"cunn_(?:Spatial)?SoftMax(Forward|Backward)|softmax_warp_(forward|backward)", base):
        log = "log-" if "LogSoftMax" in arguments else ""
        return f"{log}softmax {(match[1] or match[2]).lower()}"
    if base in ("Kernel", "Kernel2", "device_kernel") and (match := re.match(r"<\s*([\w:]+)", arguments)):
        base = match[1].rsplit("::", 1)[-1]
        if inner := re.search(r"\bFlashAttn\w+", arguments):
            base = inner[0]
    if base == "kernel" and (match := re.search(r"(\w+)::kernel\b", plain)):
        base = match[1]
    return re.sub(r"_tilesize(\d+(?:x\d+)+).*", r" \1", re.sub(r"_knob_.*", "", base))


def _split(plain: str) -> tuple[str, str]:
    """The function's own name without namespaces, and what follows it: template arguments and parameters."""
    if not (end := re.search(r"[<(]", plain)):
        return plain, ""
    head = plain[: end.start()].rsplit("::", 1)[-1].split(" ")[-1]
    return head or plain, plain[end.start() :]


def _first(table: tuple[tuple[str, str], ...], text: str) -> str:
    """The words of the first row whose pattern is found, `\1` in them replaced; empty if there is none."""
    for pattern, words in table:
        if match := re.search(pattern, text):
            return re.sub(r"\\(\d)", lambda group, found=match: found[int(group[1])].lower(), words)
    return ""


def _direction(text: str) -> str:
    """`Host-to-Device` as torch's profiler says it: `HtoD`."""
    match = re.match(r"(\w)\w*-to-(\w)", text)
    return f"{match[1]}to{match[2]}" if match else text
