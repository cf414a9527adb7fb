"""Asynchronous rollouts: engines that go on exploring while the learner learns.

`ledger` keeps count of the groups, `replica` is one engine with its orders and its news, `links`
carry them to a thread or a process, `ray_link` to other hosts, and `fleet` deals tasks, tells of
new weights and hands batches to the learner.
"""
