"""Findings of `horovod-quant doctor`, a module for each section."""
