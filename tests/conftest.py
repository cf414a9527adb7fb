"""What all tests share.

Most of what they run is compiled for one or two runs of small shapes, so the CPU backend compiles
without optimising: the same sums in less time.  With `libtpu` installed JAX would look for TPUs.
What whoever starts the tests has set wins; processes that tests start inherit both.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
