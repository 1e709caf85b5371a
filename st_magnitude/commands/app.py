"""The command line: ``st-magnitude demo``, ``train``, ``calibrate``, ``compress``, ``diagnose``, ``report``, ...

A command is a function that prints for people and returns its figures. What all have in common is in ``_command``: bad
input is one line on stderr and exit code 2, an interrupt 130 (128 and the signal's number), and ``--json`` sends what
is said to stderr and prints the figures to stdout.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from st_magnitude.corpus.beir import RetrievalData
    from st_magnitude.evaluation import CompressionCell
    from st_magnitude.evaluation.calibration import ExponentCurve

Number = TypeVar("Number", int, float)
Figures = Mapping[str, Any]

app = typer.Typer(
    name="st-magnitude",
    help="Train embedding models whose geometry is used: magnitude-aware losses for sentence-transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)
_show_traceback = False


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("st-magnitude"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Before a command: where its error arose.")] = False,
) -> None:
    global _show_traceback
    _show_traceback = traceback


def _command(function: Callable[..., Figures | None], **settings: Any) -> Callable[..., Figures | None]:
    """Registers a command."""

    @wraps(function)
    def run(**options: Any) -> Figures | None:
        as_json = options.get("as_json", False)
        is_first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun or accelerate launch started
        try:
            with contextlib.ExitStack() as stack:
                if as_json or not is_first:
                    stdout = sys.stderr if is_first else stack.enter_context(open(os.devnull, "w"))
                    stack.enter_context(contextlib.redirect_stdout(stdout))
                figures = function(**options)
        except KeyboardInterrupt as interrupt:
            typer.secho(str(interrupt) or "Interrupted.", fg=typer.colors.YELLOW, err=True)
            raise typer.Exit(128 + getattr(interrupt, "signal", signal.SIGINT)) from None
        except (ValueError, TypeError, OSError, ImportError) as error:
            if _show_traceback:
                raise
            typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from None
        if "RANK" in os.environ:
            _leave_process_group()
        if as_json and is_first:
            from st_magnitude._json import to_plain

            typer.echo(json.dumps(to_plain(figures), allow_nan=False))
        return figures

    return app.command(**settings)(run)


def _leave_process_group() -> None:
    """Join gloo's threads: one that still releases the last collective as the interpreter ends aborts the process.

    Not after an error, as other processes may be waiting; and not NCCL's, which would wait for the one that measures.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # of the trainer, whose DistributedDataParallel holds the group
        dist.destroy_process_group()


def _read_config(context: typer.Context, file: Path | None) -> None:
    """Options that a YAML file names are defaults of the command: what is given on the command line goes before."""
    if file is None:
        return
    import yaml

    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: no UTF-8, no such day
        raise typer.BadParameter(f"{file} cannot be read as YAML: {error}") from None
    names = {parameter.name for parameter in context.command.params} - {"config", "help"}
    names = {"json" if name == "as_json" else name for name in names if name}
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{file} holds {type(given).__name__}, not options, as in 'batch_size: 64'.")
    options = {str(key).replace("-", "_"): value for key, value in given.items()}
    if unknown := sorted(options.keys() - names):
        raise typer.BadParameter(f"{file} names {unknown}, but {context.info_name} takes {sorted(names)}.")
    for name, value in options.items():
        if isinstance(value, dict):
            raise typer.BadParameter(f"{file}: {name} holds a mapping, not a value.")
        if isinstance(value, list):
            if any(isinstance(item, list | dict) for item in value):
                raise typer.BadParameter(f"{file}: {name} holds a list within a list, not values.")
            options[name] = ",".join(map(str, value))
    if "json" in options:
        options["as_json"] = options.pop("json")
    context.default_map = {**(context.default_map or {}), **{k: v for k, v in options.items() if v is not None}}


# Options of several commands
Model = Annotated[str, typer.Argument(help="Folder or hub id of the model.")]
Data = Annotated[Path, typer.Option(help="Folder with corpus.jsonl, queries.jsonl and qrels/<split>.tsv (BEIR).")]
Encoded = Annotated[int, typer.Option(min=1, help="Texts encoded at a time.")]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Tokens of a text that the model reads.")]
ReadOut = Annotated[str | None, typer.Option(help="cosine, dot, qnorm or dnorm; default: the model's own.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the output.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and all else to stderr.")]
Config = Annotated[
    Path | None,
    typer.Option(
        callback=_read_config,
        is_eager=True,
        expose_value=False,
        help="YAML file of options, as in 'batch_size: 64'; the command line goes before it.",
    ),
]


@_command
def demo(
    output: Annotated[Path, typer.Option(help="A new folder for models, figures and the picture.")] = Path("runs/demo"),
    model: Annotated[str | None, typer.Option(help="Folder or hub id; default: all-MiniLM-L6-v2 from PyPI.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each of the two models.")] = 60,
    batch_size: Annotated[int, typer.Option(min=2, help="Queries a step.")] = 32,
    seed: Annotated[int, typer.Option(help="Of data, order and dropout.")] = 0,
    as_json: AsJson = False,
    config: Config = None,
) -> Figures:
    """Teach a retriever the API docs of this Python environment, with cosine and with QNorm (about 6 minutes).

    Everything is local: the docstrings of the installed packages and a model from PyPI. Needs the extra "demo".
    """
    from st_magnitude.commands.demo.run import run

    return run(output, model=model, steps=steps, batch_size=batch_size, seed=seed, say=typer.echo)


@_command
def train(
    data: Data,
    model: Annotated[str, typer.Option(help="Folder or hub id of the SentenceTransformer to start from.")],
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")],
    loss: Annotated[str, typer.Option(help="cosine, dot, qnorm, dnorm or learnable.")] = "qnorm",
    dims: Annotated[str | None, typer.Option(help="Prefixes to train, as in 96,192,384; default: the whole.")] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="To sum over at every prefix, as in 0.03,0.06,0.1; default: 0.05.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the qrels to train on.")] = "train",
    dev_split: Annotated[
        str, typer.Option(help="Split for choosing the document exponent, where there is one.")
    ] = "dev",
    epochs: Annotated[float, typer.Option(min=0, help="Passes over the training pairs.")] = 1.0,
    max_steps: Annotated[int, typer.Option(help="Stop after so many steps; overrides --epochs.")] = -1,
    batch_size: Annotated[int, typer.Option(min=2, help="Pairs a step of each process; each is a negative.")] = 32,
    mini_batch_size: Annotated[int | None, typer.Option(min=1, help="Gradient caching by so many texts.")] = None,
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak rate of AdamW.")] = 2e-5,
    negatives: Annotated[int | None, typer.Option(min=0, help="Hard negatives a row; default 1 if judged.")] = None,
    max_length: MaxLength = None,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    seed: Annotated[int, typer.Option(help="Of order, negatives and dropout.")] = 0,
    resume: Resume = False,
    as_json: AsJson = False,
    config: Config = None,
) -> Figures:
    """Fine-tune a retriever on a folder in BEIR's layout; save a model that sentence-transformers loads.

    Pairs with score 0 in the qrels are explicit negatives. With a dev split, the document exponent at inference is
    then swept on it. Ctrl-C ends the run behind the step that is being made, with a checkpoint for --resume.
    """
    from st_magnitude.commands.train import train as run
    from st_magnitude.corpus.beir import available_splits, load_beir

    prefixes, taus = _numbers("--dims", dims, int), _numbers("--temperatures", temperatures, float)
    splits = available_splits(data)
    loaded = load_beir(data, split)
    held_out = load_beir(data, dev_split) if dev_split in splits and dev_split != split else None
    typer.echo(f"{split}: {loaded}")
    trainer = run(
        model,
        loaded,
        output,
        loss,
        dims=prefixes,
        temperatures=taus,
        max_length=max_length,
        num_negatives=negatives,
        epochs=epochs,
        max_steps=max_steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        mini_batch_size=mini_batch_size,
        seed=seed,
        save_steps=save_steps,
        resume=resume,
    )
    typer.echo(f"Saved to {output}.")
    figures: dict[str, Any] = {"output": str(output), "loss": loss, "steps": trainer.state.global_step}
    if trainer.is_world_process_zero():
        figures["geometry"] = json.loads((output / "training.json").read_text(encoding="utf-8"))["geometry"]
        before, after = figures["geometry"]["before"], figures["geometry"]["after"]
        for key in after:
            typer.echo(f"  {key:40} {before[key]:.4f} -> {after[key]:.4f}")
        if held_out is not None:
            figures |= _dev_figures(trainer.model, held_out, dev_split)
    return figures


@_command
def calibrate(
    model: Model,
    data: Data,
    split: Annotated[str, typer.Option(help="Split of the qrels to choose on: validation data.")] = "dev",
    confirm: Annotated[str | None, typer.Option(help="Another split, to measure the choice on.")] = None,
    exponents: Annotated[
        str | None, typer.Option(help="Document exponents to try, as in 0.25,0.5,0.75; default: 0, 0.05, ..., 1.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Save the model there, with the exponent chosen.")] = None,
    batch_size: Encoded = 32,
    max_length: MaxLength = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    as_json: AsJson = False,
    config: Config = None,
) -> Figures:
    """Choose how much of the document norm a trained model is read out with, from 0 (dot) to 1 (cosine).

    Nothing is trained. Queries and corpus are encoded once. The interval beside the best exponent comes from the
    queries that chose it and flatters: --confirm test measures the choice on others.
    """
    from st_magnitude.corpus.beir import load_beir
    from st_magnitude.evaluation.calibration import calibrate_exponent
    from st_magnitude.geometry import paired_bootstrap
    from st_magnitude.surgery.normalize import export, prepare

    gammas = _numbers("--exponents", exponents, float)
    if output is not None and output.exists() and (output.is_file() or any(output.iterdir())):
        raise FileExistsError(f"{output} is not an empty folder. Choose another --output.")
    chosen_on = load_beir(data, split)
    confirmed_on = None if confirm is None else load_beir(data, confirm)
    encoder = _load(model, max_length)

    def sweep(loaded: RetrievalData, gammas: list[float] | None) -> ExponentCurve:
        judged = (loaded.queries, loaded.corpus, loaded.relevant_docs)
        return calibrate_exponent(encoder, *judged, gammas, batch_size, seed=seed, show_progress_bar=True)

    typer.echo(f"{split}: {chosen_on}")
    curve = sweep(chosen_on, gammas)
    typer.echo(str(curve))
    figures: dict[str, Any] = {"split": split, **_curve_figures(curve)}
    if confirmed_on is not None:
        typer.echo(f"{confirm}: {confirmed_on}")
        check = sweep(confirmed_on, [curve.best])
        chosen = check.per_query[list(check.exponents).index(curve.best)]
        figures["confirm"] = {"split": confirm, "queries": len(check.queries), "ndcg@10": float(chosen.mean())}
        for name, other in (("cosine", check.per_query[-1]), ("dot", check.per_query[0])):
            gain, low, high = figures["confirm"][f"versus_{name}"] = paired_bootstrap(chosen, other, seed=seed)
            typer.echo(f"  {curve.best:g} - {name}: {gain:+.4f} [{low:+.4f}, {high:+.4f}] nDCG@10")
    if output is not None:
        export(prepare(encoder, curve.best_similarity), output)
        figures["output"] = str(output)
        typer.echo(f"Saved to {output}{'' if curve.best in (0, 1) else ', for stm.load'}.")
    return figures


@_command
def compress(
    model: Model,
    data: Data,
    split: Annotated[str, typer.Option(help="Split of the qrels to measure on.")] = "test",
    dims: Annotated[
        str | None, typer.Option(help="Prefixes, as in 384,192,96; default: all dimensions, 1/2, 1/4 and 1/8.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Documents that the bits pass on to rescoring.")] = 100,
    similarity: ReadOut = None,
    batch_size: Encoded = 32,
    max_length: MaxLength = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for compression.csv and compression.png; replaces both.")
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> Figures:
    """Measure what a shorter prefix, int8 and binary embeddings keep of nDCG@10, and what they save.

    Nothing is trained. Queries and corpus are encoded once. The picture needs the extra "plot".
    """
    from st_magnitude.corpus.beir import load_beir
    from st_magnitude.evaluation import CompressionEvaluator
    from st_magnitude.evaluation.compression import table

    prefixes = _numbers("--dims", dims, int)
    _folder(output)
    loaded = load_beir(data, split)
    evaluator = CompressionEvaluator(
        loaded.queries,
        loaded.corpus,
        loaded.relevant_docs,
        dims=prefixes,
        top_k=top_k,
        similarity=similarity,
        batch_size=batch_size,
        show_progress_bar=True,
    )
    encoder = _load(model, max_length)
    typer.echo(f"{split}: {loaded}")
    evaluator(encoder)
    typer.echo(table(evaluator.cells))
    if output is not None:
        _save_compression(evaluator.cells, output, title=f"{Path(model).name}, {data.name} {split}")
    return {"split": split, "cells": [cell.row for cell in evaluator.cells]}


@_command
def encode(
    model: Model,
    corpus: Annotated[
        Path, typer.Option(exists=True, help="A .jsonl or .parquet file, a folder of them, or one in BEIR's layout.")
    ],
    output: Annotated[Path, typer.Option(help="Folder of the embeddings: a new one, or one to go on with.")],
    role: Annotated[str, typer.Option(help="document or query.")] = "document",
    prompt: Annotated[str | None, typer.Option(help="Before every text; default: the model's own.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    shard_size: Annotated[
        int, typer.Option(min=1, help="Documents of a file: what a killed run loses at most.")
    ] = 20000,
    batch_size: Encoded = 32,
    devices: Annotated[
        str | None, typer.Option(help="A process each, as in cuda:0,cuda:1 or cpu,cpu; default: the first GPU.")
    ] = None,
    max_length: MaxLength = None,
    as_json: AsJson = False,
    config: Config = None,
) -> Figures:
    """Encode a large corpus into Parquet files; the same command goes on after it was stopped or killed.

    Nothing that is whole is encoded again, and another model, corpus or setting in the same folder is refused.
    """
    from st_magnitude.corpus.encoding import encode_corpus

    _folder(output)
    figures = encode_corpus(
        _load(model, max_length),
        corpus,
        output,
        role=role,
        prompt=prompt,
        dtype=dtype,
        shard_size=shard_size,
        batch_size=batch_size,
        devices=None if devices is None else [name.strip() for name in devices.split(",")],
        show_progress_bar=True,
    )
    typer.echo(
        f"{figures['encoded']:,} of {figures['documents']:,} documents encoded now. {output} is complete; "
        f"the metric of its index is {figures['index_metric']}."
    )
    return {"output": str(output), **figures}


@partial(_command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def mteb(context: typer.Context) -> None:
    """mteb's own command line, for models and data that lie on this machine.

    st-magnitude mteb run -m my-model -t my-data --output-folder results

    -m: the folder of a saved model, or any name that mteb knows. -t: a folder in BEIR's layout (retrieval), a .csv,
    .tsv or .jsonl file with sentence1, sentence2 and score (STS), one with text and label (clustering), or the name of
    a task of mteb. All other arguments are mteb's: "mteb run --help" lists them. Needs the extra "eval".
    """
    from st_magnitude.mteb import run

    try:
        run([argument for argument in context.args if argument != "--"])
    except KeyError as error:  # mteb's, for a name that it does not know
        raise ValueError(error.args[0]) from error


@_command
def revela(
    corpus: Annotated[Path, typer.Option(help="Folder (or file) of text, Markdown, reST, HTML, source or JSON lines.")],
    retriever: Annotated[str, typer.Option(help="Folder or hub id: a SentenceTransformer or a bare decoder.")],
    lm: Annotated[str, typer.Option(help="Folder or hub id of a causal language model, or a GGUF file.")],
    output: Annotated[Path, typer.Option(help="Folder for the trained retriever.")],
    temperature: Annotated[float, typer.Option(help="Of the similarities; the paper's is 1e-4.")] = 0.05,
    read_weight: Annotated[float, typer.Option(help="Of what documents read in each other; the paper's is 1.")] = 1.0,
    v_norm: Annotated[bool, typer.Option(help="Divide what is read by the size of values (Eq. 6).")] = True,
    group_size: Annotated[int, typer.Option(min=2, help="Chunks that read each other.")] = 16,
    max_words: Annotated[int, typer.Option(min=1, help="Words of a chunk.")] = 120,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a chunk that the models read.")] = 160,
    epochs: Annotated[float, typer.Option(help="Passes over the corpus.")] = 1.0,
    max_steps: Annotated[int, typer.Option(help="Stop after so many steps; overrides --epochs.")] = -1,
    batch_size: Annotated[int, typer.Option(min=1, help="Groups a step.")] = 1,
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1, help="Batches before each update.")] = 1,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the retriever; default: 1e-4 for a LoRA, 2e-5 for a whole encoder.")
    ] = None,
    lm_learning_rate: Annotated[float, typer.Option(help="Of the language model's LoRA.")] = 1e-4,
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of both LoRAs.")] = 256,
    warmup_steps: Annotated[int, typer.Option(min=0, help="At most a tenth of all steps.")] = 100,
    held_out: Annotated[float, typer.Option(help="Share of documents kept for evaluation.")] = 0.1,
    max_queries: Annotated[int, typer.Option(min=1, help="Section titles that are asked.")] = 300,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory, more time.")] = False,
    bf16: Annotated[bool | None, typer.Option(help="Default: where the hardware has it.")] = None,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    resume: Resume = False,
    seed: Annotated[int, typer.Option(help="Of the split, the order and dropout.")] = 0,
    as_json: AsJson = False,
    config: Config = None,
) -> Figures:
    """Learn a retriever from raw text, by language modelling with in-batch attention (Revela).

    Some documents are held out: their section titles ask for their chunks, before and after, for the retriever, BM25
    and both fused. Needs the extra "revela".
    """
    from st_magnitude.revela.run import run

    figures = run(
        corpus,
        retriever,
        lm,
        output,
        temperature=temperature,
        read_weight=read_weight,
        v_norm=v_norm,
        group_size=group_size,
        max_words=max_words,
        max_length=max_length,
        epochs=epochs,
        max_steps=max_steps,
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        learning_rate=learning_rate,
        lm_learning_rate=lm_learning_rate,
        lora_rank=lora_rank,
        warmup_steps=warmup_steps,
        held_out=held_out,
        max_queries=max_queries,
        gradient_checkpointing=gradient_checkpointing,
        bf16=bf16,
        save_steps=save_steps,
        resume=resume,
        seed=seed,
        say=typer.echo,
    )
    typer.echo(f"Saved to {output}.")
    return figures


@_command
def diagnose(
    model: Model,
    data: Data,
    split: Annotated[str, typer.Option(help="Split of the qrels to measure on.")] = "test",
    baseline: Annotated[str | None, typer.Option(help="Another model to measure beside it.")] = None,
    similarity: ReadOut = None,
    symmetric: Annotated[
        str | None, typer.Option(help="yes or no: are queries and documents interchangeable? Default: it looks.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Share of nDCG@10 that smaller storage may cost.")] = 0.05,
    min_gain: Annotated[float, typer.Option(help="Smallest gain in nDCG@10 that is worth a change.")] = 0.02,
    batch_size: Encoded = 32,
    max_length: MaxLength = None,
    seed: Annotated[int, typer.Option(help="Of the halves of the queries and the bootstrap.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for diagnosis.json, report.html and its pictures; replaces them.")
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> Figures:
    """Measure whether length, compression or isotropy will help a model on your queries, and say what to do.

    Nothing is trained. Queries and corpus are encoded once. What is recommended has a gain whose 95 % interval excludes
    zero on queries that did not choose it; use some hundreds of queries. The page needs the extra "plot".
    """
    from st_magnitude.corpus.beir import load_beir
    from st_magnitude.diagnosis.diagnose import diagnose as run

    if symmetric not in (None, "yes", "no"):
        raise ValueError(f"--symmetric takes 'yes' or 'no', got {symmetric!r}.")
    _folder(output)
    loaded = load_beir(data, split)
    encoders = [_load(path, max_length) for path in (model, baseline) if path is not None]
    typer.echo(f"{split}: {loaded}")
    found = run(
        encoders[0],
        loaded.queries,
        loaded.corpus,
        loaded.relevant_docs,
        similarity=similarity,
        baseline=encoders[1] if baseline is not None else None,
        symmetric=None if symmetric is None else symmetric == "yes",
        min_gain=min_gain,
        tolerance=tolerance,
        batch_size=batch_size,
        seed=seed,
        show_progress_bar=True,
        title=f"{Path(model).name}, {data.name} {split}",
    )
    typer.echo(str(found))
    if output is not None:
        from st_magnitude.diagnosis.report import write_report

        found.save(output / "diagnosis.json")
        typer.echo(f"Saved {output / 'diagnosis.json'}.")
        try:
            typer.echo(f"Saved {write_report(found, output)}.")
        except ImportError as error:
            typer.secho(f"No report.html: {error}", fg=typer.colors.YELLOW, err=True)
    return found.to_dict()


@_command
def report(
    diagnosis: Annotated[Path, typer.Argument(help="diagnosis.json, as diagnose --output writes it.")],
    output: Annotated[Path, typer.Option(help="Folder for report.html and its pictures; replaces them.")],
    log: Annotated[
        Path | None,
        typer.Option(help="Training curves: a trained model's or a run's folder, or the CSV of a NormMonitor."),
    ] = None,
    compression: Annotated[Path | None, typer.Option(help="compression.csv, as compress --output writes it.")] = None,
    title: Annotated[str | None, typer.Option(help="Of the page; default: the model's name.")] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> Figures:
    """Make one page of a diagnosis, a training log and a compression table: no model is loaded.

    One HTML file that needs no other file and no network. Needs the extra "plot".
    """
    from st_magnitude.diagnosis.report import write_report

    page = write_report(diagnosis, output, log=log, compression=compression, title=title)
    typer.echo(f"Saved {page}.")
    return {"report": str(page), "pictures": sorted(str(picture) for picture in page.parent.glob("*.png"))}


def _load(path: str, max_length: int | None) -> SentenceTransformer:
    from st_magnitude.commands.train import limit_length
    from st_magnitude.surgery.normalize import load

    model = load(path)
    if max_length is not None:
        limit_length(model, max_length)
    return model


def _folder(output: Path | None) -> None:
    """Refuses a file, before anything is loaded."""
    if output is not None and output.is_file():
        raise ValueError(f"--output is a folder, but {output} is a file: choose another name.")


def _numbers(option: str, given: str | None, kind: type[Number]) -> list[Number] | None:
    try:
        return None if given is None else [kind(number) for number in given.split(",")]
    except ValueError:
        example = "384,192,96" if kind is int else "0.03,0.06,0.1"
        kinds = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} takes {kinds} with commas between, as in {example}; got {given!r}.") from None


def _save_compression(cells: list[CompressionCell], output: Path, title: str) -> None:
    from st_magnitude.diagnosis.report import plot_compression

    output.mkdir(parents=True, exist_ok=True)
    with (output / "compression.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(cells[0].row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(cell.row for cell in cells)
    typer.echo(f"Saved {output / 'compression.csv'}.")
    try:
        plot_compression(cells, output / "compression.png", title)
        typer.echo(f"Saved {output / 'compression.png'}.")
    except ImportError as error:
        typer.secho(f"No compression.png: {error}", fg=typer.colors.YELLOW, err=True)


def _dev_figures(model: SentenceTransformer, held_out: RetrievalData, split: str) -> dict[str, Any]:
    from st_magnitude.evaluation import MagnitudeEvaluator
    from st_magnitude.evaluation.calibration import calibrate_exponent
    from st_magnitude.surgery.raw import normalizes_output

    judged = (held_out.queries, held_out.corpus, held_out.relevant_docs)
    scores = MagnitudeEvaluator(*judged, name=split, write_csv=False)(model)
    for key, value in scores.items():
        typer.echo(f"  {key:40} {value:.4f}")
    if normalizes_output(model):
        return {"scores": scores}
    curve = calibrate_exponent(model, *judged)
    typer.echo(str(curve))
    return {"scores": scores, "calibration": _curve_figures(curve)}


def _curve_figures(curve: ExponentCurve) -> dict[str, Any]:
    means = {f"{exponent:g}": float(value) for exponent, value in zip(curve.exponents, curve.ndcg, strict=True)}
    return {
        "exponent": curve.best,
        "queries": len(curve.queries),
        "ndcg@10": means,
        "versus_cosine": curve.versus_cosine,
        "versus_dot": curve.versus_dot,
    }


def main() -> None:
    app()


if __name__ == "__main__":
    main()
