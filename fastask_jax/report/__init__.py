"""What a run leaves behind for people: metrics, traces, tables, plots, summary, progress bar.

Everything here reads plain records (dicts of numbers and text) and knows nothing of models or
JAX, so a report can be made again from a run directory alone.  An *episode record* is a dict
with `type`, `family`, `difficulty`, `correct`, `reward`, `parts`, `turns`, `cells`, `seconds`.
"""
