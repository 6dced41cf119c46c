"""GGUF files as targets: see folder.py."""
