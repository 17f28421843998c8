"""Kernels, parallelism and trustworthy measurements for Stanford CS336's assignment 2, "Systems".

Importing this package needs neither torch nor a GPU; each part says why it is unavailable when it is asked for.
"""

__version__ = "0.1.0"
