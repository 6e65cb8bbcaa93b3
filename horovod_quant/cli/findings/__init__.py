"""The findings of `horovod-quant doctor`: a file for each of its sections."""
