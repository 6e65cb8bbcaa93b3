"""Published schemes, one file per paper, and `Hierarchical`, which nests any.

A new scheme registers itself, as these do, and is imported here. Help texts name the schemes in the order of imports.
"""

# isort: off
from horovod_quant.schemes.qsgd import QSGD
from horovod_quant.schemes.nuqsgd import NUQSGD
from horovod_quant.schemes.global_qsgd import GlobalQSGD
from horovod_quant.schemes.eden import EDEN
from horovod_quant.schemes.binsgdm import BinSGDM
from horovod_quant.schemes.hierarchical import Hierarchical
# isort: on

__all__ = ["BinSGDM", "EDEN", "GlobalQSGD", "Hierarchical", "NUQSGD", "QSGD"]
