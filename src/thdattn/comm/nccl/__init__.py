"""NCCL: ranks with GPUs, and the transport that is used where they have no peer memory."""
