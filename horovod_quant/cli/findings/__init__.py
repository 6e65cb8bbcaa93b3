"""What `horovod-quant doctor` finds: a file for each of its sections."""
