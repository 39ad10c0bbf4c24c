"""From CUDA source to a loaded kernel."""
