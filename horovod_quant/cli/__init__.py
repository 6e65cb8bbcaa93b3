"""The command ``horovod-quant``."""
