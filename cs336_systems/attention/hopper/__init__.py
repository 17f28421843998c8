"""FlashAttention for Hopper GPUs. For 16-bit tensors in Gluon, Triton's lower language: `forward` and `backward` hold
the kernels, `launch` says what they serve and launches them, `tma` makes the descriptors of their tensors. For fp32 in
Triton, with products of bf16: `split` and `split_launch`. What follows is about the first.

The algorithm and its symbols are those of `attention.triton`; the kernels here say who does what and when,
which Triton's own language leaves to its compiler. A program is a *producer* warp, which has the TMA unit copy tiles to
shared memory, and *groups* of four warps (128 threads, what a wgmma instruction needs), which compute on 64 rows each.
They meet at barriers in shared memory (mbarriers): `full` ones are fulfilled by arriving bytes, `empty` ones by groups
when done. A tile with stages is a ring: use number t has slot t % STAGES, and parity (t // STAGES) & 1 of its barriers.

Lengths need not be multiples of anything: TMA reads zeros outside of a tensor and does not write there. The head
dimension is padded in the same way, to D = 64 or 128.

Sources: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2; PTX ISA 8.7 (wgmma, mbarrier, TMA copies).
"""
