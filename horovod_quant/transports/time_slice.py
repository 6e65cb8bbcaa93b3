"""Time slice of a thread, which decides how soon it runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import threading

SHORTEST = 100_000
"""Nanoseconds, the shortest slice that Linux accepts."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call, for which most versions of glibc have no function."""

# struct sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def shorten() -> None:
    """Request the shortest time slice for the calling thread.

    Of the waiting threads with equal claims, Linux runs the one with the shortest slice first (EEVDF, Linux 6.12). The
    thread's share of the core and its nice value stay the same. It has no effect where the system does not support it,
    or where the thread has a policy other than SCHED_OTHER.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not hasattr(os, "sched_getscheduler"):
        return
    with contextlib.suppress(OSError):  # a container may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SHORTEST, 0, 0)
            ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(0), attributes, ctypes.c_uint(0))
