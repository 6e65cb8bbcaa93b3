"""Transports, which perform a scheme's collectives, and rewrites of requests for them.

`simulator` and `mpi` run whole reductions; the frontends are the transports over Horovod. Between a scheme and its
transport `pairwise_via_allreduce`, `split_sums` and `emulate_with_allreduce` replace requests, with bit-identical
results.
"""
