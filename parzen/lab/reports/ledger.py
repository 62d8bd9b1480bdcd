"""The ledger: every figure, table and claim of the paper, at its own scale and a small one, and what holds.

The claims are those of ``EXPERIMENTS``; what was measured comes from the ``summary.json`` files below
``results/``.

Source: *Sparse Attention as Compact Kernel Regression* (arXiv 2601.22766), sections 4 and 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from parzen.lab import console
from parzen.lab.experiments import EXPERIMENTS
from parzen.lab.experiments.claims import ALIKE, FAILS, HOLDS, NOT_RUN, SLIGHTLY, UNSURE, Claim, Results
from parzen.lab.files import write_whole
from parzen.lab.reports.page import NONE


def claims(*scales: str) -> list[Claim]:
    """All of some scales, in the order of the paper; what needs no runs is at "exact"."""
    return [claim for row in EXPERIMENTS.values() for scale in scales for claim in row.claims(scale)]


HEAD = f"""# Results: what of the paper holds

Every figure, table and claim of *Sparse Attention as Compact Kernel Regression* (arXiv 2601.22766), at the
paper's scale and at a *small* one that two CPU cores can run. `parzen report --ledger` writes this file from
the list in `parzen/lab/experiments/` and the `summary.json` files below `results/`; nothing in it is typed.

A mean is given ± half its 95 % Student t interval over seeds; without ±, there is one seed. Claims compare
kernels at equal settings, seed by seed, on the same batches; the scatter of a difference of losses or TVDs is
pooled over all kernels of the setting. A claim *holds* if the intervals of all its numbers lie in the range
given, *does not hold* if one lies outside (Bonferroni-corrected for their number), and else we *cannot tell*:
the intervals overlap, or there is one seed. The result shown is the number with the least room. What counts
as alike is ±{ALIKE:g}, as slightly {SLIGHTLY:g} (nats per token, TVD, or accuracy).
"""


def ledger(results: Results, chosen: Sequence[Claim], head: str = HEAD) -> str:
    """Everything about the ``chosen`` claims as Markdown: how many hold, the tables they are about, each."""
    outcomes = {claim.id: claim.decide(results) for claim in chosen}
    places = list(dict.fromkeys((claim.where, claim.scale) for claim in chosen))
    verdicts = (HOLDS, FAILS, UNSURE, NOT_RUN)
    rows_of = {row.where: row for row in EXPERIMENTS.values()}
    overview, sections = [], []
    for where, scale in places:
        here = [claim for claim in chosen if (claim.where, claim.scale) == (where, scale)]
        count = Counter(outcomes[claim.id].verdict for claim in here)
        overview.append([where, scale, *(str(count[verdict]) for verdict in verdicts)])
        tables = [table.render(results) for table in rows_of[where].tables(scale)]
        rows = [
            [
                f"`{claim.id}`",
                claim.text,
                str(claim.decide),
                outcomes[claim.id].result or NONE,
                outcomes[claim.id].verdict,
            ]
            for claim in here
        ]
        title = f"## {where}, {scale}: {rows_of[where].title}\n"
        listed = console.markdown_table(["row", "claim", "decided by", "result", "verdict"], rows)
        sections.append("\n".join([title, *tables, listed]))
    table = console.markdown_table(["where", "scale", *verdicts], overview)
    return "\n".join([head, table, *sections])


def write(results: Path = Path("results"), to: Path = Path("docs/results.md")) -> None:
    """Writes the ledger of the summaries below ``results``.

    Raises:
        UserError: a damaged summary, or a file that cannot be written.
    """
    write_whole(to, ledger(Results(results), claims("exact", "small", "paper")).encode())
