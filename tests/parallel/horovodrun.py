"""``horovodrun``, but that it takes Horovod to have been built with the controller it is asked for.

It would find that out at every launch by importing TensorFlow in a process of its own, which takes 3 of a launch's 4
seconds; workers of a Horovod without that controller fail by themselves. The rest is Horovod's own launcher, which
test_lab.py and scripts/demo start by its own name.
"""

from __future__ import annotations

import sys

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())
