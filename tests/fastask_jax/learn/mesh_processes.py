"""A train step of one of several processes, run by `test_mesh.py`.

    mesh_processes.py PROCESS COUNT PORT FILE

Process 0 writes the parameters and metrics after two steps to FILE (npz).
"""

import sys
from dataclasses import replace

import conftest as toy
import jax
import numpy as np
from mesh_steps import CONFIG, OPTIMIZER

from fastask_jax.distributed import host_copy
from fastask_jax.learn import Objective, PackConfig, make_train_step, pack
from fastask_jax.learn import results as floats
from fastask_jax.learn.score import make_scorer
from fastask_jax.model import init_params, make_mesh

SMALLER_STEPS = replace(OPTIMIZER, learning_rate=10.0)


def main(process, count, port, file):
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    assert jax.device_count() == 4 and len(jax.local_devices()) == 4 // count
    params = init_params(CONFIG, jax.random.key(0))
    items = [toy.trajectory(3 + 7 * n % 30, n, CONFIG.vocab_size) for n in range(8)]
    packed = pack(items, PackConfig((32,), micro_batch_rows=4, min_rows=8))
    # With two processes, `fsdp` lies between them and `tensor` within each.
    mesh = make_mesh(1, 2, 1, 2)
    step = make_train_step(CONFIG, Objective(), SMALLER_STEPS, micro_batch_rows=4, mesh=mesh)
    state = step.init(params)
    for _ in range(2):
        state, metrics = step(state, packed)
        # All leaves at once, while the step is under way: no process may run ahead of the others.
        moments = host_copy(state.opt_state)
    logprobs, _ = make_scorer(CONFIG, micro_batch_rows=4, mesh=mesh)(state.params, packed)
    values = floats(metrics)
    whole = host_copy(state.params)
    if process == 0:
        flat = {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(whole)}
        assert len(jax.tree.leaves(moments)) > 2 * len(flat)
        np.savez(file, logprobs=logprobs, loss=values["loss/total"], **flat)
    if count > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
