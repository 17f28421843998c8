"""What compilers make of the kernels, ahead of time and without a GPU (`aot`), and the search for tiles (`tune`)."""
