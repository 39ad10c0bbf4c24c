"""The Mamba-2 mixer over packed sequences, spread over ranks as the attention is."""
