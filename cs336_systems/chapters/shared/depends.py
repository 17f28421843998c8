"""The files that numbers of several tables depend on: parts of their `DEPENDS` (see `store.provenance`).

What starts processes and keeps rows (`launch`, `store`, `on_ranks.py`) or chooses what is timed (`needs.py`,
`attention/registry.py`, `attention_peers.py`) is not among them.
"""

MODEL = ("accounting/model.py", "accounting/operations.py", "model.py", "sizes.py")
PLAIN = ("attention/inputs.py", "attention/reference.py")
TILED = ("attention/flash_torch.py", "attention/inputs.py")
TRITON = (
    "attention/available.py", "attention/flash_triton.py", "attention/inputs.py", "attention/machine_code.py",
    "attention/triton/again.py", "attention/triton/backward.py", "attention/triton/kernels.py",
    "attention/triton/launch.py", "attention/triton/tiles.py",
    "attention/hopper/backward.py", "attention/hopper/backward_dq.py", "attention/hopper/backward_ends.py",
    "attention/hopper/backward_few.py", "attention/hopper/backward_state.py", "attention/hopper/backward_steps.py",
    "attention/hopper/backward_wide.py", "attention/hopper/common.py", "attention/hopper/configs.py",
    "attention/hopper/forward.py", "attention/hopper/forward_alone.py", "attention/hopper/forward_state.py",
    "attention/hopper/forward_wide.py", "attention/hopper/launch.py", "attention/hopper/split.py",
    "attention/hopper/split_launch.py", "attention/hopper/tma.py",
)  # fmt: skip
CUDA = (
    "attention/flash_cuda.py", "attention/cuda/compile.py", "attention/cuda/launch.py", "attention/cuda/tables.py",
    "attention/cuda/backward.cu", "attention/cuda/forward.cu", "attention/cuda/instructions.cuh",
    "attention/cuda/tiles.cuh",
)  # fmt: skip
ATTENTION = (*PLAIN, *TILED, *TRITON, *CUDA)  # any of them
LADDER = (
    "ladder/function.py", "ladder/kernels.py", "ladder/launch.py", "ladder/resources.py", "ladder/steps.py",
)  # fmt: skip
TURNS = ("measure/device.py", "measure/clocks/turns.py")
CALL_CLOCK = (*TURNS, "measure/clocks/calls.py")
STEP_CLOCK = (*TURNS, "measure/clocks/steps.py")
RANK_CLOCK = (*STEP_CLOCK, "measure/clocks/ranks.py")
MEMORY = ("measure/memory/memory.py", "measure/memory/replay.py")
STEP = (*MODEL, *PLAIN, "chapters/shared/step.py")
# whole steps in turns, with any attention
STEPS = (
    *STEP, *ATTENTION, *STEP_CLOCK, *MEMORY, "accounting/hardware.py", "accounting/memory.py",
    "chapters/shared/steps.py", "measure/trace/profiler.py",
)  # fmt: skip
PARALLEL = (
    "parallel/agreement.py", "parallel/buckets.py", "parallel/data_parallel.py", "parallel/ddp.py",
    "parallel/readers.py", "parallel/shares.py", "parallel/state.py", "parallel/zero.py",
)  # fmt: skip
PARALLEL_STEP = (*STEP, *PARALLEL, *RANK_CLOCK, "chapters/shared/parallel_step.py")
NSYS = (
    "measure/trace/events.py", "measure/trace/kernels.py", "measure/trace/nsys.py", "measure/trace/profiler.py",
)  # fmt: skip
# the loop that trains, on stories
TRAINING = (
    *MODEL, *PARALLEL, "accounting/hardware.py", "training/batches.py", "training/clock.py", "training/config.py",
    "training/loop.py", "training/modes.py", "training/optimizer.py", "training/pipeline.py", "training/stories.py",
    "training/stories.txt", "training/tokens.py",
)  # fmt: skip
FORECAST = ("accounting/fsdp.py", "accounting/memory.py", "accounting/zero.py", "training/forecast.py")
