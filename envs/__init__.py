"""Tasks, tools, rewards, sandbox and process pool.  Never imports jax, fastask_jax or kernels."""
