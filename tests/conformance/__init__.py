"""Against other projects' own code, where it is installed."""
