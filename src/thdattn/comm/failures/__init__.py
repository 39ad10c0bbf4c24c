"""Failures of ranks: deadlines, heartbeats, and outcomes that all ranks learn."""
