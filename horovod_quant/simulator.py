"""Runs n workers in lockstep in one process: the public name of `horovod_quant.transports.simulator`."""

from horovod_quant.transports.simulator import Merge, Result, run

__all__ = ["Merge", "Result", "run"]
