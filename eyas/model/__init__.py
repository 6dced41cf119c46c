"""Targets and heads: shapes, weights, layers and checkpoints."""
