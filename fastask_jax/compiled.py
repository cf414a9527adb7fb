"""A folder that keeps compiled programs for later processes.

Leaves out clearing it: JAX bounds nothing, so delete the folder when it has grown.
"""

from __future__ import annotations

from pathlib import Path


def keep_compiled(folder: Path) -> None:
    """Makes `folder` the compile cache of JAX in this process, for programs of any size.

    Whoever can write there can run code here.
    """
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    reset_cache()  # JAX settles at its first compilation whether there is a cache
