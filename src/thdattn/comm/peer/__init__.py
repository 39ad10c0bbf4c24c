"""Peer memory: ranks of one machine read and write each other's GPU memory."""
