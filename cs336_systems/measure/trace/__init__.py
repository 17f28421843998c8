"""What a GPU did and when: recorded by `nsys` or torch's `profiler`, read as `events`, classified by `kernels`."""
