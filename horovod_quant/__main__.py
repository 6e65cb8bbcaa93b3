"""``python -m horovod_quant`` is the command ``horovod-quant``."""

from horovod_quant.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
