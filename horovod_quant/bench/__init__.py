"""Measures whole exchanges of a model's gradients through Horovod: `horovod-quant bench`, `benchmarks/exchange.py`.

An exchange lasts from the start of the backward pass until the synchronized gradients are there. The pass computes
nothing: the gradients are there already, the same random values in every exchange. `torch_trial` and
`tensorflow_trial` say how that is done; neither imports the other's framework.
"""
