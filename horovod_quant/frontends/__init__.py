"""What the frontends for PyTorch and TensorFlow share."""
