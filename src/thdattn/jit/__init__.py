"""Compilation of CUDA source to loaded kernels, and the types that Python shares with kernels."""
