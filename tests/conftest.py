"""What all tests share.

Most of what they run is compiled for one or two runs of small shapes, so the CPU backend compiles
without optimising and without its newer emitters: the same sums in half the time.  What takes long
to compile is kept for the tests, and the processes that they start, which compile it again.  With
`libtpu` installed JAX would look for TPUs.  What whoever starts the tests has set wins; processes
that tests start inherit all of it.
"""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false",
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # else a worker of pytest-xdist, or their wish
    compiled = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
