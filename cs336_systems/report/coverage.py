"""What the assignment asks, and where this project answers it: one table for all problem ids."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of the handouts, or some parts of one: its points in spring 2025 and in spring 2026 (None: not asked;
    0: without points of their own), the notebook that answers it, and in our words what it asks, by the letters of its
    parts where it has any."""

    id: str
    points: tuple[int | None, int | None]
    chapter: str
    questions: str | dict[str, str]

    def by_part(self) -> dict[str, str]:
        """`"nsys_profile (a)"`, or the problem's id where it has no parts → question."""
        if isinstance(self.questions, str):
            return {self.id: self.questions}
        return {f"{self.id} ({x})": text for x, text in self.questions.items()}


PROBLEMS = (
    Problem("benchmarking_script", (4, 4), "benchmarking", {
        "a": "A script that times forward, backward and the optimizer's step of a model given by its hyperparameters.",
        "b": "How long do forward and backward take at each size, and how much do ten steps vary?",
        "c": "What changes without warm-up steps, and why do one or two not settle it?",
    }),
    Problem("nsys_profile", (5, 5), "profiling", {
        "a": "How long does forward take under the profiler, and does Python's clock agree?",
        "b": "Which kernel takes the most GPU time in forward, how often is it called, and is it first with backward?",
        "c": "Which kernels other than GEMMs take a share of forward that matters?",
        "d": "How does the GEMMs' share change in a whole training step with AdamW?",
        "e": "In attention, how does the time of softmax compare with the GEMMs', and how do their FLOPs?",
    }),
    Problem("mixed_precision_accumulation", (1, 1), "mixed_precision",
        "What becomes of 0.01 added a thousand times in four combinations of fp32 and fp16, and why?"),
    Problem("benchmarking_mixed_precision", (2, 2), "mixed_precision", {
        "a": "Which dtype has each tensor of a small model under fp16 autocast?",
        "b": "Which parts of layer norm need fp32, and does bf16 need the same care?",
        "c": "How much faster are forward and backward in bf16, and what is the trend over sizes?",
    }),
    Problem("memory_profiling", (4, 4), "memory", {
        "a": "How does active memory run through forward and through a whole step, and can one see the stages?",
        "b": "What is the peak at each context length, for forward and for a whole step?",
        "c": "Does mixed precision change the peaks?",
        "d": "How large is one tensor of the residual stream in fp32?",
        "e": "Which are the largest allocations of forward, and which code makes them?",
    }),
    Problem("memory_profiling", (None, 0), "checkpointing", {
        "f": "What does one block save for backward, by operation, and how large are the gradients that it makes?",
    }),
    Problem("gradient_checkpointing", (None, 4), "checkpointing", {
        "a": "Which nesting of checkpoints takes the least memory, and how do memory and compute grow with N blocks?",
        "b": "Which block size is best for xl without nesting, and what are the peaks of it and of its neighbors?",
    }),
    Problem("pytorch_attention", (2, 2), "attention",
        "Plain attention over head dimensions and lengths: times, memory before backward, and where it runs out."),
    Problem("torch_compile", (2, 2), "torch_compile", {
        "a": "How does compiled attention compare with eager attention on the same grid?",
        "b": "How does the compiled Transformer compare, in forward and in a whole step?",
    }),
    Problem("flash_forward", (15, 15), "flash_bench", {
        "a": "FlashAttention-2's forward pass in plain PyTorch, tile by tile.",
        "b": "The same as a Triton kernel.",
        "c": "Causal masking, by a flag.",
    }),
    Problem("flash_backward", (5, 5), "flash_bench",
        "A backward pass that computes the probabilities anew, in PyTorch and compiled."),
    Problem("flash_benchmarking", (5, 5), "flash_bench",
        "How fast are forward, backward and both beside PyTorch, over lengths, head dimensions and dtypes?"),
    Problem("leaderboard", (0, None), "leaderboard",
        "How long do both passes take at 16 heads, 16,384 tokens and d = 64 in bf16, causal?"),
    Problem("flash_backward_triton", (0, 0), "flash_bench", "The backward pass as a Triton kernel (optional)."),
    Problem("distributed_communication_single_node", (5, 5), "allreduce",
        "How long does an all-reduce take, by backend, size and number of processes, and how do these interact?"),
    Problem("naive_ddp", (5, 5), "ddp",
        "Data parallel training that all-reduces each gradient after backward, equal to training on one process."),
    Problem("naive_ddp_benchmarking", (3, 3), "ddp",
        "How long does its step take for xl on two GPUs, and which share of it is communication?"),
    Problem("minimal_ddp_flat_benchmarking", (2, 2), "ddp",
        "What does one all-reduce of all gradients in one tensor change?"),
    Problem("ddp_overlap_individual_parameters", (5, 5), "ddp",
        "A wrapper that all-reduces each gradient as soon as backward has made it."),
    Problem("ddp_overlap_individual_parameters_benchmarking", (1, 1), "ddp", {
        "a": "How long does its step take beside the two before?",
        "b": "Do traces show that communication overlaps backward, and that it did not before?",
    }),
    Problem("ddp_overlap_bucketed", (8, None), "ddp",
        "The same in buckets: one all-reduce once the last gradient of a bucket is ready."),
    Problem("ddp_bucketed_benchmarking", (3, None), "ddp", {
        "a": "How does a step's time depend on the buckets' size, and is that what one expects?",
        "b": "A formula for the time that communication adds, and the bucket size that makes it least.",
    }),
    Problem("communication_accounting", (10, None), "parallelism", {
        "a": "How much memory does XXL's training take on one device, and how many GPUs of 80 GB is that?",
        "b": "How much is it a device when it is sharded over N of them, and which N brings it below 95 GB?",
        "c": "From which batch a device is forward compute-bound on TPU v5p, FSDP over 16, tensor parallelism over 4?",
        "d": "What lowers that batch?",
    }),
    Problem("optimizer_state_sharding", (15, 15), "zero",
        "An optimizer whose ranks update a share of the parameters each."),
    Problem("optimizer_state_sharding_accounting", (5, 5), "zero", {
        "a": "Peak memory after construction, before the optimizer's step and after it, with and without sharding.",
        "b": "What does sharding cost in time?",
        "c": "How does it differ from ZeRO's first stage?",
    }),
    Problem("fsdp", (None, 15), "fsdp",
        "A wrapper that shards weights, gathers each layer's in time, and reduce-scatters its gradients."),
    Problem("fsdp_accounting", (None, 5), "fsdp", {
        "a": "What does FSDP save at the peak against sharding the optimizer alone?",
        "b": "For xl on two GPUs, does the all-gather finish in time in forward?",
    }),
    Problem("alternate_ring_all_reduce", (None, 1), "parallelism",
        "How long does an all-reduce take whose ring passes on whole tensors?"),
    Problem("data_parallel_calcs", (None, 3), "parallelism",
        "Data parallel backward of a gated layer: FLOPs, communication time, and up to how many devices it hides."),
    Problem("fsdp_calcs", (None, 3), "parallelism",
        "The same for FSDP, forward and backward."),
    Problem("tp_calcs", (None, 4), "parallelism", {
        "a": "Which equations does backward follow under tensor parallelism, and which collective does it need?",
        "b": "How many FLOPs does each device do in each pass?",
        "c": "How long does communication take in each pass?",
        "d": "Up to how many devices does it hide?",
    }),
    Problem("fsdp_tp_calcs", (None, 6), "parallelism", {
        "a": "How many FLOPs does each device of an FSDP × tensor-parallel grid do, forward?",
        "b": "How long does communication take if the two axes overlap?",
        "c": "Up to how many devices does it hide, at the best split?",
        "d": "And if the two axes share the network?",
    }),
)  # fmt: skip
QUESTIONS = {part: text for problem in PROBLEMS for part, text in problem.by_part().items()}


def anchor(part: str) -> str:
    """The label of an answer's box: `"nsys_profile (a)"` → `"answer-nsys-profile-a"`."""
    return "answer-" + part.translate(str.maketrans("_ ", "--", "()"))


def parts(chapter: str = "") -> list[str]:
    """What is to be answered, by one chapter or all, in the handout's order."""
    return [part for problem in PROBLEMS if chapter in ("", problem.chapter) for part in problem.by_part()]


def project_root() -> Path:
    """The checkout around the working directory; FileNotFoundError where there is none."""
    start = Path.cwd().resolve()
    for folder in (start, *start.parents):
        if (folder / "_toc.yml").is_file() and (folder / "book").is_dir():
            return folder
    raise FileNotFoundError(
        f"no _toc.yml and book/ in {start} or above it: run inside a checkout of cs336_systems"
    )


def chapters_in_toc(root: Path) -> list[str]:
    """The pages that `_toc.yml` lists, in order, without the index."""
    return re.findall(r"^\s*- file: *(\S+)", (root / "_toc.yml").read_text(), flags=re.M)
