"""The optimization ladder of the leaderboard's attention: kernels with switches, and the steps that flip them one by
one.

`steps` says what each step changes and what it should cost (no torch), `kernels` are FlashAttention-2 in plain Triton
with one switch per step, `launch` runs a step on tensors, `resources` reads what the compiler made of it.
`hopper_kernels` and `hopper_launch` are the backward pass for Hopper GPUs as it was before the kernel in use. These are
kernels to learn from; the ones to use are in `cs336_systems.attention`.
"""
