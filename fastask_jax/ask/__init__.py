"""Ask a workbook: the product, on the command line and as a library.

    with Asker() as asker:                        # or Asker("runs/fast-ask")
        answer = asker.ask("book.xlsx", "Which vendor had the largest spend in 2024 Q1?")
        print(answer.answer, answer.evidence)

Importing this package imports no JAX; an `Asker` does, once it has found its files.
"""

from fastask_jax.ask.answer import Answer, AskError, Unreachable
from fastask_jax.ask.asker import Asker
from fastask_jax.ask.choice import PolicyChoice
from fastask_jax.ask.command import main

__all__ = ["Answer", "AskError", "Asker", "PolicyChoice", "Unreachable", "main"]
