"""A plan: what a rank sees of a packed batch, as key ranges, tables and work buffers."""

from thdattn.plan.plan import Plan as Plan
