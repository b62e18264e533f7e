"""Kernels for NVIDIA GPUs: CUDA C++ compiled at run time, and what calls them."""
