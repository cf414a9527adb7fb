"""Keeping large host buffers between steps, for training on CPUs.

XLA allocates one large buffer of temporaries for every run of a compiled function.  glibc takes
allocations of that size from the kernel and returns them when they are freed, so every step
faults in (and the kernel zeroes) the same hundred megabytes again: a quarter of the time of a
tiny model's train step.  `keep_large_buffers` makes the C allocator keep them.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_large_buffers() -> bool:
    """Makes this process keep freed memory for reuse; call it once, before the first JAX call.

    The resident size then stays at its peak.  Returns whether it was done: only glibc on Linux
    has the call, and elsewhere nothing changes.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    # One arena, the one that grows by brk: the others are mapped, and unmapped when they shrink.
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 64 << 20),
    )
    return all([mallopt(name, value) == 1 for name, value in settings])
