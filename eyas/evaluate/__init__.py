"""The eval stage: what a head brings, known before any server runs: tau measured, time per token
predicted.
"""
