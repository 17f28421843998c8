"""FlashAttention-2 in Triton: `kernels` to read, their `launch`, their `tiles`."""
