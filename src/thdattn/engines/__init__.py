"""The engines, which compute, on NumPy or CUDA: functions of the same names and arguments."""
