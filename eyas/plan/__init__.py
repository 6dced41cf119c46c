"""What a run needs before anything runs."""
