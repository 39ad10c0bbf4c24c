"""Collectives beside kernels: what transports through peer memory and through NCCL share."""
