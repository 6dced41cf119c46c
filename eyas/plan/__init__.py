"""What a run will need before anything runs: tokens and bytes (needs), hours here or on a named GPU
(speeds, sample).
"""
