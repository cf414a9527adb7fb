"""One module per experiment, run with `python -m experiments.NAME`.

Leaves out everything reusable: that lives in `fastask_jax` and `envs`.
"""

from fastask_jax._guard import check_kernels

check_kernels()
