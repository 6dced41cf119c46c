"""Targets and heads: shapes, weights, layers and checkpoints. Knows no stage and no request."""
