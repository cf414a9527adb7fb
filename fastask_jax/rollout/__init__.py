"""Rollouts: turns weights and environments into trajectories, token in and token out.

`chat` and `toolcalls` are the format, `transcript` the record, `engine` and `sampling` decode,
`pools` and `scheduler` run many episodes at once.  Only `engine`, `sampling` and `scheduler`
need JAX; importing this package imports none of them.
"""
