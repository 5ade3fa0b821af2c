"""Neighbour search in pure PyTorch, for machines without torch-cluster or pyg-lib."""

from __future__ import annotations

from .search import RadiusGraph, radius_graph

__all__ = ["RadiusGraph", "radius_graph"]
