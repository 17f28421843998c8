"""What compilers make of the kernels: ahead of time, without a GPU (`aot`), and in `machine_code`."""
