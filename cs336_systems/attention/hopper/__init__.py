"""FlashAttention for Hopper GPUs. For 16-bit tensors in Gluon, Triton's lower language: `forward` and `backward` hold
the kernels in use, `forward_alone` the one for short rows, `backward_few` the one for few queries, `forward_state` what
travels together in the forward ones; `configs` chooses their tiles, `launch` says what they serve and launches them,
`tma` makes the descriptors of their tensors. For fp32 in Triton, with bf16 matmuls: `split` and `split_launch`. What
follows is about the first.

The algorithm and its symbols are those of `attention.triton`; the kernels here say who does what and when, which
Triton's own language leaves to its compiler. A program is a *producer* warp, which has the TMA unit copy tiles to
shared memory, and *groups* (consumer warpgroups: four warps, 128 threads, what a wgmma instruction needs), which
compute on 64 rows each; forward programs of one group can load their own tiles (`forward_alone`). A *persistent*
program stays on its multiprocessor and does the work of many. They synchronize by barriers in shared memory
(mbarriers): `full` ones complete when the bytes have arrived, `empty` ones when the groups are done. A staged tile is a
ring buffer: its t-th use has slot t % STAGES, and parity (t // STAGES) & 1 of its barriers.

Lengths need not be multiples of anything: TMA reads zeros outside of a tensor and does not write there. The head
dimension is padded in the same way, to D = 64 or 128; matmuls leave out what 65 to 96 columns do not need (`common`).

Sources: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2; Zadouri et al., "FlashAttention-4" (2026), for
sums that are rescaled lazily; PTX ISA 8.7 (wgmma, mbarrier, TMA copies).
"""
