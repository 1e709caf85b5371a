"""``st-magnitude diagnose``: measure what would help a model, and recommend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from st_magnitude._files import refuse_foreign, written
from st_magnitude.workbench.commands.core import Figures, ModelId, Ranked, Report, command, folder


@command
def diagnose(
    model: ModelId,
    *,
    judged: Ranked,
    tolerance: Annotated[float, Option(help="Share of nDCG@10 that storage may cost.")] = 0.05,
    min_gain: Annotated[float, Option(help="Smallest gain in nDCG@10 to act on.")] = 0.02,
    seed: Annotated[int, Option(min=0, help="Seed of the folds and the intervals.")] = 0,
    verbose: Annotated[bool, Option(help="Print all measurements as well.")] = False,
    report: Report = None,
    output: Annotated[
        Path | None, folder("Folder for diagnosis.json and diagnosis.md, which are replaced.")
    ] = None,
) -> Figures:
    """Measure what would help a model on your queries.

    The command measures norms and storage, and says what to do. Nothing is trained. If a change is
    clearly better (the 95 % interval excludes 0) on queries that did not choose it, the command
    recommends it; this takes some hundreds of queries.
    """
    if output is not None:
        for name in ("diagnosis.json", "diagnosis.md"):
            refuse_foreign(output / name)
    if report is not None:
        refuse_foreign(report)
    splits = judged.splits()
    splits.check_held_out(judged.split)
    encoder, split, data = judged.load(model, splits)
    from st_magnitude.workbench.diagnosis.diagnose import diagnose as run

    found = run(
        encoder,
        data,
        similarity=judged.similarity,
        also_relevant=splits.relevant_documents(),
        min_gain=min_gain,
        tolerance=tolerance,
        seed=seed,
        **judged.encode,
    )
    typer.echo(str(found))
    if verbose:
        typer.echo("".join(f"\n{table}\n" for table in found.measurements))
    if report is not None:
        from st_magnitude.workbench.report import write_report

        title = f"Diagnosis of {found.model} on {split}"
        said = "\n".join(map(str, found.recommendations))
        shown = {"min_gain": min_gain, "tolerance": tolerance, "seed": seed}
        systems = found.systems
        before, after = (system.ranking for system in systems)
        write_report(report, title, said, systems, before, after, shown, seed)
    if output is not None:
        found.save(output / "diagnosis.json")
        tables = [table.to_markdown() for table in found.measurements]
        text = "\n\n".join([found.to_markdown(), *tables])
        with written(output / "diagnosis.md") as file:
            file.write(f"{text}\n")
        typer.echo(f"Saved diagnosis.json and diagnosis.md in {output}.")
    return found.to_dict()
