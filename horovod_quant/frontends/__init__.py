"""Parts that the frontends for PyTorch and TensorFlow share."""
