"""What runs in PyTorch's operators, for training and for targets that others compute."""
