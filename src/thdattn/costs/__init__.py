"""The cost model: predicted times of attention under every method."""

from thdattn.costs.model import predicted as predicted
