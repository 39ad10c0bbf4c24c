"""Plans: one rank's view of a packed batch, as key ranges, tables and work buffers."""

from thdattn.plan.plan import Plan as Plan
