"""Inference over all nodes of a store, layer by layer, in bounded memory."""

from clients.inference.run import layerwise

__all__ = ["layerwise"]
