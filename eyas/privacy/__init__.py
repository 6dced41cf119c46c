"""Personal data and secrets in texts: found, and what is done about them. Knows texts and findings,
neither rows nor models.
"""
