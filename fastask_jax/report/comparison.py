"""Several policies on the same tasks: how they did, and what their differences say.

`compare` turns records into the object of `evaluation.json`; `comparison_tables` and
`comparison_plot` draw from that object alone.  Differences are paired: per task, the mean over
one policy's rollouts less the mean over the other's, over the tasks that both have.  A difference
whose 95 % interval holds 0 is inside the noise, and is called so.

Left out: how the records came about (`fastask_jax.evaluation`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastask_jax.report.intervals import paired_interval, unpaired_interval
from fastask_jax.report.stats import mean
from fastask_jax.report.summary import Record, by_task, exact_match, groups, summarize

GROUPS = ("family", "type", "difficulty")


def compare(
    policies: Mapping[str, Sequence[Record]],
    reference: str,
    *,
    prices: Mapping[str, Mapping[str, float | None]] | None = None,
    **about: Any,
) -> dict[str, Any]:
    """policies: records by name, each with `task` and `rollout`; those without one are left out.
    reference: whose seconds are 1, and with whom groups are compared.
    prices: of the policies whose tokens cost something, US dollars for a million of each kind
    (`remote.Price`).  about: further members of the object.

    Members: `policies` (each one's `summarize`, with tokens, price and time), and `differences`
    over all tasks for each pair; `differences_by` family, type and difficulty has those to the
    reference; `families` has the types of each.
    """
    found = {name: list(records) for name, records in policies.items() if records}
    summaries = {}
    for name, records in found.items():
        rates = (prices or {}).get(name)
        summaries[name] = summarize(records) | _use(records, rates)
    base = summaries.get(reference, {}).get("seconds")
    for summary in summaries.values():
        summary["seconds_ratio"] = summary["seconds"] / base if base else None
    pairs = [difference(found, one, other) for other, one in itertools.combinations(found, 2)]
    families: dict[str, set[str]] = {}
    for record in itertools.chain(*found.values()):
        families.setdefault(str(record["family"]), set()).add(str(record["type"]))
    grouped = {}
    others = [name for name in found if name != reference]
    for key in GROUPS if reference in found else ():
        names = sorted({str(r[key]) for records in found.values() for r in records})
        grouped[key] = {value: _in_group(found, key, value, others, reference) for value in names}
    return {
        **about,
        "reference": reference,
        "families": {family: sorted(types) for family, types in sorted(families.items())},
        "policies": summaries,
        "differences": [pair for pair in pairs if pair is not None],
        "differences_by": grouped,
    }


def difference(
    policies: Mapping[str, Sequence[Record]], one: str, other: str
) -> dict[str, Any] | None:
    """The exact match of `one` less that of `other`, on the tasks that both have; None where
    there are none.

    low, high: the paired 95 % interval.  unpaired: what it would be from two sets of tasks.
    noise: whether the paired one holds 0.
    """
    sides = [{r[0]["task"]: r for r in by_task(policies[name])} for name in (one, other)]
    shared = [task for task in sides[0] if task in sides[1]]
    if not shared:
        return None
    right = [[[float(bool(r["correct"])) for r in s[task]] for task in shared] for s in sides]
    means = [np.array([mean(values) for values in side]) for side in right]
    fewest = min(min(map(len, side)) for side in right)
    bounds = paired_interval(means[0] - means[1], 1 / fewest)
    found = float(means[0].mean() - means[1].mean())
    # The half tasks of the interval draw it towards 0: of few tasks it may not reach what is seen.
    low, high = min(float(bounds[0]), found), max(float(bounds[1]), found)
    shares = [exact_match([r for task in shared for r in side[task]]) for side in sides]
    wide = unpaired_interval(shares[0][0], shares[0][1:], shares[1][0], shares[1][1:])
    return {
        "policy": one,
        "than": other,
        "difference": found,
        "low": low,
        "high": high,
        "unpaired": [float(bound) for bound in wide],
        "noise": low <= 0 <= high,
        "tasks": len(shared),
    }


def _in_group(
    found: Mapping[str, Sequence[Record]],
    key: str,
    value: str,
    others: Sequence[str],
    reference: str,
) -> list[dict[str, Any]]:
    chosen = {name: groups(key, records).get(value, []) for name, records in found.items()}
    pairs = [difference(chosen, name, reference) for name in others]
    return [pair for pair in pairs if pair is not None]


def _use(records: Sequence[Record], rates: Mapping[str, float | None] | None) -> dict[str, Any]:
    """Tokens of an episode, sampled and read, and its price: means, None where not all know."""

    def mean_of(name: str) -> float | None:
        values = [r.get(name) for r in records]
        return None if None in values else mean(float(v) for v in values if v is not None)

    costs = [price(r, rates) for r in records]
    known = [cost for cost in costs if cost is not None]
    return {
        "tokens": mean_of("tokens"),
        "prompt_tokens": mean_of("prompt_tokens"),
        "price": mean(known) if len(known) == len(costs) else None,
        "price_total": sum(known) if len(known) == len(costs) else None,
    }


def price(record: Record, rates: Mapping[str, float | None] | None) -> float | None:
    """US dollars of an episode; None without rates, or where its tokens weren't counted."""
    prompt, completion = record.get("prompt_tokens"), record.get("tokens")
    if rates is None or prompt is None or completion is None or record.get("estimated"):
        return None
    cached, written = record.get("cached_tokens") or 0, record.get("written_tokens") or 0
    plain = float(rates["prompt"] or 0.0)
    given = (rates.get("cached"), rates.get("written"))
    kept, stored = (plain if rate is None else rate for rate in given)
    total = (prompt - cached - written) * plain + cached * kept + written * stored
    return float(total + completion * (rates["completion"] or 0.0)) / 1e6


def in_words(pair: Mapping[str, Any], tasks: str = "these tasks") -> str:
    """One sentence of a difference."""
    one, other = pair["policy"], pair["than"]
    numbers = (
        f"{100 * pair['difference']:+.1f} points (95 %: {100 * pair['low']:+.1f} to "
        f"{100 * pair['high']:+.1f})"
    )
    if pair["noise"]:
        return f"{one} and {other}: {numbers}, inside the noise: {tasks} don't tell them apart."
    word = "better" if pair["difference"] > 0 else "worse"
    return f"{one} is {word} than {other}: {numbers}."
