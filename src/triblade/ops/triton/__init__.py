"""Kernels in Triton; imported only where it is installed."""
