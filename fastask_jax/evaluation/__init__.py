"""Evaluation: any policies on one frozen task set, a record an episode, resumed where it stopped.

`specs` says which policies, `tasks` freezes the set, `store` keeps the records, `play` plays
what is missing, `players` are the policies that need no engine of ours.  `experiments.evaluate`
is the command; what the records say is `fastask_jax.report.comparison`'s.  Imports no JAX.
"""
