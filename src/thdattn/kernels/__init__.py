"""Device code, and the constants that its kernels are compiled with."""
