"""Commands of `python -m thdattn`."""
