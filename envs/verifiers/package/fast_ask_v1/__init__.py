"""Fast Ask by the name under which `verifiers` finds tasksets: `vf-eval fast-ask-v1`.

Plugins of verifiers are top-level modules; setup.py installs this folder as one.  It also names the
chat loop that plays the taskset where no other harness is asked for.
"""

from envs.verifiers.harness import ChatHarness
from envs.verifiers.taskset import FastAskTaskset

__all__ = ["ChatHarness", "FastAskTaskset"]
