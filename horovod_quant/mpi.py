"""Public name of `horovod_quant.transports.mpi`: one worker over mpi4py, without Horovod."""

from horovod_quant.transports.mpi import Result, run

__all__ = ["Result", "run"]
