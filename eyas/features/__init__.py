"""From prompts to features: the target answers (generate), and what it thought while it did is
stored (capture).
"""
