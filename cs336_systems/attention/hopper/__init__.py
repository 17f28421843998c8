"""FlashAttention for Hopper GPUs. For 16-bit tensors in Gluon, Triton's lower language: `forward` and `backward` hold
the kernels in use, `forward_alone` the one for short rows, `forward_wide` and `backward_wide` those for more than 128
columns, `backward_few` the one for few queries, `forward_state` and `backward_state` what travels together in them;
`backward_ends` what runs before and after; `configs` chooses tiles, `launch` says what they serve and launches them,
`tma` makes the descriptors of their tensors. For fp32 in Triton, with bf16 matmuls: `split` and `split_launch`. What
follows is about the first.

The algorithm and its symbols are those of `attention.triton.kernels`; the kernels here say who does what and when,
which Triton's own language leaves to its compiler. A program is a *producer* warp, which has tiles copied to shared
memory, and *groups* (consumer warpgroups), which compute on 64 rows each; forward programs of one group can load their
own tiles (`forward_alone`). A *persistent* program stays on its multiprocessor and does the work of many.

    group           a warpgroup: four warps, 128 threads. (Of heads that share keys says HEADS_PER_KV.)
    wgmma           its matmul: issued by all four warps, done by the tensor cores while they go on. The second operand
                    comes from shared memory, the first from there or from registers, where the result is, in fp32.
                    `warpgroup_mma_wait(n, deps)` waits until at most the last n are under way; deps may be read then
    TMA             the unit that copies whole tiles between global and shared memory, or adds them, for one thread that
                    says so. It knows a tensor by its *descriptor*: address, shape, strides, shape of a tile.
                    `tma.store_wait(n)` waits until all but the thread's last n stores have read their shared memory
    fence_async_shared      between what threads write to shared memory and what TMA or wgmma read there
    mbarrier        counts arrivals in shared memory, and the bytes that an arrival tells it to `expect`. When all have
                    come, its phase is complete and the next one begins. `wait(barrier, parity)` waits until the phase
                    of that parity, 0 for the first, is complete
    full, empty     barriers of a place for tiles: bytes have arrived; all who read it, a group as one, are done
    ring            STAGES such places (*slots*) by turns. Its t-th use has slot t % STAGES and phase t // STAGES of the
                    slot's barriers, parity (t // STAGES) & 1: nobody keeps a phase, all count uses. Who fills a slot
                    waits for the phase of `empty` before, parity ^ 1, which a new barrier counts as complete
    registers       a launch gives all threads as many. `warp_specialize` takes from the producer's warps and gives to
                    groups (setmaxnreg): its last argument, a number per thread

With a causal mask query i sees the keys up to i, from the first that a `limit` leaves it: a window, the number of keys
that it sees at most, or where the documents of a packed sequence begin and end, the bounds of `attention.triton`; None
where there is none. What nobody sees is not loaded.

Lengths need not be multiples of anything: TMA reads zeros outside of a tensor and does not write there. The head
dimension is padded in the same way, to D = 64, 128, 192 or 256; matmuls leave out what 65 to 96 columns do not need
(`common`).

Sources: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2; Zadouri et al., "FlashAttention-4" (2026), for
sums that are rescaled lazily; PTX ISA 8.7 (wgmma, mbarrier, TMA copies).
"""
