"""Failures of ranks: deadlines, heartbeats, and outcomes that are agreed between ranks."""
