"""The learner and the product: model, rollout, learn, policies, ask, report.

Importing this package imports none of them, nor JAX, so that light commands start fast.  It
checks one thing: that the module `kernels` is ours and not a stranger of the same name.
"""

import os

from fastask_jax._guard import check_kernels

__version__ = "0.1.0"

check_kernels()

# transformers, used here for tokenizers, would advise every user to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
