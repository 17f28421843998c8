"""FlashAttention-2 in CUDA C++: kernels (`tiles.cuh` has the legend), how they are compiled and launched."""
