"""Environments between us and `verifiers` (Prime Intellect), v1, both ways.

`taskset`: Fast Ask as a taskset that `vf-eval` and trainers of that protocol run; `package/` holds
the module by which they find it, `fast_ask_v1`.  `env`: any installed taskset as an environment of
ours, for our trainer.  `choice` imports nothing of verifiers, the other modules need the extra
`[verifiers]` and take seconds to import.
"""
