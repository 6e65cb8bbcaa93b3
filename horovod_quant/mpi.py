"""Runs one worker over mpi4py, without Horovod: the public name of `horovod_quant.transports.mpi`."""

from horovod_quant.transports.mpi import Result, run

__all__ = ["Result", "run"]
