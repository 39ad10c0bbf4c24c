"""Side collectives: NCCL on a stream of its own, where ranks have no peer memory."""
