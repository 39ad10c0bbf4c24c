"""The cost model: predicted times of attention under every method.

    import thdattn.costs

    both = thdattn.costs.predicted(batch, cp_size=8, num_heads=32, head_dim=128, num_kv_heads=8,
                                   cp_comm_type="all_gather", sharding="balanced")
    both.forward, both.backward, both.total  # seconds

`python -m thdattn advise` prints the same for all methods and shardings. `costs.scale.simulated`
compares them on more and more ranks.
"""

from thdattn.costs.model import H200, Both, Rates, predicted

__all__ = ["H200", "Both", "Rates", "predicted"]
