"""The methods of context parallelism: one module each, written once for every engine and every comm.

A method says what travels between ranks and when. Only the plan and the method know it: engines see rows and ranges.
base.py says what all methods have in common, select.py which one runs.
"""
