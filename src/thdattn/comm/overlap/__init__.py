"""Collectives that overlap kernels: their contract, and the base of the transports that run them."""
