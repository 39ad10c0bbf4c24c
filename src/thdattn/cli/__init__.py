"""The commands of `python -m thdattn`."""
