"""From a trained head to what engines load: written, proved, linted, described."""
