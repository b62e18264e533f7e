"""Numeric kernels behind one Backend protocol."""
