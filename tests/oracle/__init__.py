"""The plain versions of what the native library computes: PyTorch operators and NumPy."""
