"""The published schemes, one file a paper; and what makes any of them hierarchical."""

from horovod_quant.schemes.binsgdm import BinSGDM
from horovod_quant.schemes.global_qsgd import GlobalQSGD
from horovod_quant.schemes.hierarchical import Hierarchical
from horovod_quant.schemes.nuqsgd import NUQSGD
from horovod_quant.schemes.qsgd import QSGD

__all__ = ["BinSGDM", "GlobalQSGD", "Hierarchical", "NUQSGD", "QSGD"]
