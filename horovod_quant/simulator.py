"""Public name of `horovod_quant.transports.simulator`: n workers in one process."""

from horovod_quant.transports.simulator import Merge, Result, run

__all__ = ["Merge", "Result", "run"]
