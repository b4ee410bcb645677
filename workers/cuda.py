"""Whether this process uses CUDA already: then no child of it can, and it must not fork engines.

Neither the driver nor its contexts survive a fork. What initialises the driver is often an import, and what fails is
the child's first call, so the parent looks before it forks.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_LIBRARY: Final = "libcuda.so.1"
_NOT_INITIALIZED: Final = 3


def initialised() -> bool:
    """Asks the driver, if it is loaded at all: its calls say so as long as nobody called ``cuInit``. Loads and starts
    nothing."""
    try:
        driver = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)
