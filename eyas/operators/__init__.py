"""PyTorch's side: heads in training, and targets that transformers runs."""
