"""Tasks, tools, rewards, sandbox and the process pool. Never imports jax, fastask_jax or kernels."""
