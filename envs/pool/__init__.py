"""Environments in worker processes: give an episode's reply, get its step when it is done.

```python
with EnvPool("envs.fast_ask.env:make_env", config, PoolConfig(workers=2)) as pool:
    pool.reset("a", task)                    # asynchronous, like step
    for event in pool.poll(timeout=1.0):     # whatever has finished; no barrier
        pool.step(event.episode_id, reply)
```

`pool` holds the bookkeeping (assignment, deadlines, replay, error budget), `process` one
worker as the parent sees it, `worker` what runs inside it, `wire` the frames between them.
"""

from envs.pool.config import Event, PoolConfig, PoolError
from envs.pool.pool import EnvPool

__all__ = ["EnvPool", "Event", "PoolConfig", "PoolError"]
