"""The eval stage: tau of a head, measured before any server runs it."""
