"""A deterministic engine without a model: the same contract, memory service included, and no torch."""

from workers.engines.sim.engine import SimEngine, SimFault

__all__ = ["SimEngine", "SimFault"]
