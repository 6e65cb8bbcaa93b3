"""Who performs the collectives that a scheme asks for, and how requests become others that a transport performs better.

`simulator` and `mpi` run whole exchanges; the frontends are the transports over Horovod. Between a scheme and its
transport `pairwise_via_allreduce`, `split_sums` and `emulate_with_allreduce` replace requests, with the same bits.
"""
