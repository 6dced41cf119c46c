"""What a run needs before anything runs: tokens and bytes (needs), hours here or on a named GPU
(speeds), put together from a run file (estimate).
"""
