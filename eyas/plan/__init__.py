"""What a run needs before anything runs (needs), and the tau of more training data (forecast)."""
