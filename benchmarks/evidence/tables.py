"""Rebuilds the tables of docs/research/ from the stored cells; pictures with --pictures.

    python benchmarks/evidence/tables.py [--check] [--pictures]

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``. With --check nothing is written, and the exit status is 1
if a page differs from what the cells give.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "studies" / "norm_sign"))
import batch_scale
import claims
import compression_control
import convergence
import forgetting
import fragments
import inheritance
import late_interaction
import merging
import norm_sign
import pages
import prior
import reading
import revela_text
import temperature_control as control

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.glob("research/*.md")) if "<!-- end -->" in page.read_text(encoding="utf-8")]


def study(name: str, rows: Callable[[control.Study], list[str]]) -> list[str]:
    found = control.STUDIES[name]
    return rows(found) if found.chosen else ["(No cells are stored yet.)"]


def of_fragments(rows: Callable[[list[fragments.Figures]], list[str]]) -> list[str]:
    found = fragments.stored()
    return rows(found) if found else ["(No cells are stored yet.)"]


TABLES: dict[str, Callable[[], list[str]]] = {
    **{f"claims, {source}": partial(claims.table, source) for source in claims.SOURCES},
    **{f"temperatures of Cosine, {name}": partial(study, name, control.cosine_table) for name in control.STUDIES},
    **{f"rates, {name}": partial(study, name, control.rate_table) for name in control.STUDIES},
    **{f"gains, {name}": partial(study, name, control.gain_table) for name in control.STUDIES},
    **{f"same temperature, {name}": partial(study, name, control.same_table) for name in control.STUDIES},
    **{f"low temperature, {name}": partial(study, name, control.low_table) for name in control.STUDIES},
    **{f"sums, {name}": partial(compression_control.sums_table, name) for name in control.STUDIES},
    "texts": partial(compression_control.texts_table, "static"),
    **{f"sigreg, {name}": partial(compression_control.sigreg_table, name) for name in control.STUDIES},
    "convergence": convergence.table,
    "convergence at the same rate": convergence.same_rate_table,
    "forgetting": forgetting.table,
    **late_interaction.TABLES,
    **merging.TABLES,
    "reading": reading.table,
    "fragments": partial(of_fragments, fragments.share_table),
    "pruning": partial(of_fragments, fragments.pruning_table),
    "separation": partial(of_fragments, fragments.separation_table),
    **{f"pages, {base}": partial(pages.table, base) for base in pages.CELLS},
    **{f"gains over pages, {base}": partial(pages.gain_table, base) for base in pages.CELLS},
    **{f"norms of pages, {base}": partial(pages.auc_table, base) for base in pages.CELLS},
    **{f"norm sign, {base}": partial(norm_sign.table, base) for base in norm_sign.BASES},
    "revela": partial(revela_text.ablation_table, revela_text.LATEST),
    "bases": inheritance.base_table,
    "inheritance": inheritance.tuned_table,
    "inherited": inheritance.inherited_table,
    "norm along the fine-tuning": inheritance.norm_table,
    "scale of the batch": batch_scale.table,
    "scale of the batch, same temperature": batch_scale.same_table,
    **{f"prior, {name}": partial(prior.table, name) for name in prior.SETTINGS},
    "gains by the prior": prior.gain_table,
    "norms and the prior": prior.norm_table,
}


def rebuilt(page: str) -> str:
    """The page with its tables as the cells give them."""

    def table(match: re.Match[str]) -> str:
        return "\n".join([f"<!-- {match[1]} -->", "", *TABLES[match[1]](), "", "<!-- end -->"])

    return re.sub(r"<!-- ([^>]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    after = {page: rebuilt(page.read_text(encoding="utf-8")) for page in PAGES}
    if arguments.check:
        changed = [page for page, text in after.items() if page.read_text(encoding="utf-8") != text]
        parser.exit(bool(changed), "".join(f"{page} is not what the cells give.\n" for page in changed))
    for page, text in after.items():
        page.write_text(text, encoding="utf-8")
    if arguments.pictures:
        for name, found in control.STUDIES.items():
            if found.chosen:
                control.pictures(found, name)
        if stored := fragments.stored():
            fragments.picture(stored)
        pages.picture("L3")


if __name__ == "__main__":
    main()
