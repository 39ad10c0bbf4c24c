"""Side collectives: NCCL on a stream of its own, which kernels overlap where ranks have no peer memory."""
