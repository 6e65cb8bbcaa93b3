"""Benchmark of a model's step communication through Horovod: `horovod-quant bench`, `benchmarks/exchange.py`.

A measurement lasts from the start of the backward pass until the reduced gradients are available. The pass computes
nothing: the gradients exist beforehand, with the same random values each time. `torch_trial` and `tensorflow_trial`
implement this; neither imports the other's framework.
"""
