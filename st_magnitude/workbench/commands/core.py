"""The base of all commands: registration, errors, figures as JSON.

Nothing here, and nothing at the top of a command's module, imports torch: ``--help`` and a mistyped
option answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import inspect
import logging
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import wraps
from itertools import permutations
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand
from typer.models import OptionInfo

from st_magnitude._checks import InputError, InputTypeError, MissingPackage, in_range
from st_magnitude._files import OUR_PAGE, refuse_foreign
from st_magnitude.workbench import _config
from st_magnitude.workbench._config import SkipEmpty, as_options

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.workbench.files.pairs import Splits
    from st_magnitude.workbench.judging.verdict import Verdict

Figures = Mapping[str, Any]

app = typer.Typer(
    name="st-magnitude",
    help="Train a retriever from pairs, and decide what to deploy.",
    epilog="'st-magnitude COMMAND --help' lists the options of a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich cuts long option names at 80 columns, and Markdown drops <split>
)
_INPUTS = ("data", "model", "also")  # arguments that can be files or folders
_UNSET = ", as an unset variable of the shell is; give a value."


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("st-magnitude"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# Options of several commands
ModelId = Annotated[str, typer.Argument(help="Folder or hub id of the model.")]
Base = Annotated[
    str, Option(help="Folder or hub id of a SentenceTransformer, or the static table wordllama.")
]
Also = Annotated[
    list[str] | None,
    Option(help="Folder or hub id of another model to compare; may be given several times."),
]
_Json = Annotated[bool, Option(help="Print the figures as JSON; all messages go to stderr.")]


@dataclass(frozen=True)
class DataOptions:
    """Options of the commands that read queries, documents and judgments."""

    data: Annotated[
        list[str],
        Option(
            help="Pairs: a CSV, TSV, JSON or Parquet file, a folder of them, or a data set of the"
            " hub; a folder in BEIR's layout; or texts without labels. Several files of pairs are"
            " joined: --data mined.jsonl --data pairs.csv."
        ),
    ]
    columns: Annotated[
        str | None, Option(help="Names of the columns of pairs, as query=a,document=b.")
    ] = None
    threshold: Annotated[
        float | None, Option(help="Lowest score of a relevant pair; default: 80 % of the highest.")
    ] = None
    encoding: Annotated[
        str | None, Option(help="Encoding of files that are not UTF-8, such as cp1251.")
    ] = None
    sheet: Annotated[str | None, Option(help="Sheet of a spreadsheet; default: the first.")] = None
    skip_empty: SkipEmpty = False

    def splits(self) -> Splits:
        """The splits of the data."""
        from st_magnitude.workbench.files.pairs import load_splits

        source = self.data[0] if len(self.data) == 1 else self.data
        return load_splits(
            source,
            columns=self.columns,
            threshold=self.threshold,
            encoding=self.encoding,
            sheet=self.sheet,
            skip_empty=self.skip_empty,
        )

    def show_search(self, folder: Path) -> None:
        """Says how to search the data with what was saved."""
        options = as_options(vars(self), {"skip_empty": False})
        # in one line, which a terminal copies as one
        typer.echo(f'Try it: st-magnitude search {shlex.quote(str(folder))} {options} "a question"')

    def tell(self, splits: Splits, everything: bool = False) -> None:
        """Says what was left out or moved, or everything on how the data were read."""
        from st_magnitude.workbench.files.lines import LeftOut

        for note in splits.notes:
            if everything or isinstance(note, LeftOut):
                say(note)


@dataclass(frozen=True)
class Judged(DataOptions):
    """Options of the commands that encode judged queries and their corpus with a model."""

    split: Annotated[str, Option(help="Split to measure on; keep test for the end.")] = "dev"
    batch_size: Annotated[int, Option(min=1, help="Texts to encode at a time.")] = 32

    def load(self, model: str, splits: Splits) -> tuple[SentenceTransformer, str, RetrievalData]:
        """The model, and the split to measure on with its name: see `unread_split`."""
        splits[self.split]  # before the model is loaded
        from st_magnitude.saving.export import load
        from st_magnitude.workbench.memory import unread_split

        encoder = load(model)
        self.tell(splits)
        split, data = unread_split(splits, self.split, model)
        say(f"{split}: {data}")
        return encoder, split, data

    @property
    def encode(self) -> dict[str, Any]:
        """Options of `st_magnitude.encode`."""
        return {"batch_size": self.batch_size, "show_progress_bar": show_progress()}


def command(function: Callable[..., Figures]) -> Callable[..., Figures]:
    """Registers a function, which prints for people and returns its figures, as a command.

    A parameter whose type is a dataclass becomes one option for each field (see
    `st_magnitude.workbench._config`). Bad input ends with one line on stderr and exit code 2, a
    fault of ours with a traceback and 70, an interrupt with 130 (128 and the number of the
    signal). With ``--json`` all that is printed goes to stderr, and the returned figures to stdout.
    A figure called ``exit_code`` is also the exit code of the command.
    """
    parameters, configs = _flatten(function)

    @wraps(function)
    def run(json: bool, **given: Any) -> None:
        is_first = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun
        try:
            texts: list[tuple[str, str | Path]] = []
            for name, value in given.items():
                in_range(f"--{name.replace('_', '-')}", value)
                values = value if isinstance(value, list) else [value]
                texts += [(name, text) for text in values if isinstance(text, (str, Path))]
            for name, text in texts:
                _check_text(name, str(text))
            _refuse_inputs(texts)
            with contextlib.ExitStack() as stack:
                if json or not is_first:
                    stdout = sys.stderr if is_first else stack.enter_context(open(os.devnull, "w"))
                    stack.enter_context(contextlib.redirect_stdout(stdout))
                for name, kind in configs.items():
                    options = {name: given.pop(name) for name in inspect.signature(kind).parameters}
                    given[name] = kind(**options)
                figures = function(**given)
            if "RANK" in os.environ:
                _leave_process_group()
            if json and is_first:
                from st_magnitude.result import to_plain

                typer.echo(dumps(to_plain(figures), allow_nan=False))
            sys.stdout.flush()  # a full disk is an error of the command
        except KeyboardInterrupt as interrupt:
            with contextlib.suppress(OSError):  # the terminal has closed
                say(str(interrupt) or "Interrupted.", err=True)
            raise typer.Exit(128 + getattr(interrupt, "signal", signal.SIGINT)) from None
        except Exception as error:
            raise typer.Exit(report(error)) from None
        raise typer.Exit(figures.get("exit_code", 0))

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(cls=_Command, help=function.__doc__)(run)
    return function


class _Command(TyperCommand):
    """A command that repeats no argument that it does not take, which may be a key."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if "extra argument" in getattr(error, "message", ""):
                said = "There are too many arguments; options begin with two hyphens."
                error.message = said  # type: ignore[attr-defined]
            raise


def report(error: Exception) -> int:
    """Prints an error on stderr, and returns the exit code."""
    try:
        sys.stdout.flush()
    except OSError:  # drops what the interpreter would write at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # a reader such as `head` has what it wants
        return 141  # 128 and the number of SIGPIPE, which Windows lacks
    if isinstance(error, OSError) and error.args[:1] == (errno.ENOSPC,) and error.filename is None:
        why = f"{os.strerror(errno.ENOSPC)}, where stdout or a file of another package is written"
        error = OSError(f"{why}.")  # files of ours are named
    is_for_user = isinstance(error, (OSError, InputError, InputTypeError, MissingPackage))
    with contextlib.suppress(OSError):  # nobody reads stderr
        if is_for_user:
            from st_magnitude.result import printable

            say(printable(re.sub(r"\s*\n\s*", " ", f"Error: {error}".strip())), err=True)
        else:
            traceback.print_exception(error)
            typer.echo("This is a fault of st-magnitude, and not of your input.", err=True)
    return getattr(error, "exit_code", 2) if is_for_user else 70


def _check_text(name: str, text: str) -> None:
    if not text:
        raise InputError(f"{name.upper()} is empty{_UNSET}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{name.upper()} has bytes that are not {sys.getfilesystemencoding()}: set"
            " PYTHONUTF8=1, or rename the file."
        ) from None


def _refuse_inputs(places: Sequence[tuple[str, str | Path]]) -> None:
    """Refuses an output, which is an option of type Path, that is an input or another output."""
    for (output, path), (name, other) in permutations(places, 2):
        if not isinstance(path, Path) or name == output:
            continue
        same = isinstance(other, Path) and path.resolve() == other.resolve()
        if name in _INPUTS and path.exists() and os.path.exists(other):
            same = path.samefile(other)
        if same:
            said = f"--{output.replace('_', '-')} and {name.upper()} are both {str(path)!r}"
            raise InputError(f"{said}; choose a new place to write to.")


def _flatten(function: Callable[..., Figures]) -> tuple[list[inspect.Parameter], dict[str, type]]:
    """The options of a command, one for each field of a dataclass, and the dataclasses."""
    parameters: list[inspect.Parameter] = []
    configs: dict[str, type] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = parameter.annotation
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter)
            continue
        configs[name] = kind
        hints = get_type_hints(kind, include_extras=True)
        for field, option in inspect.signature(kind).parameters.items():
            parameters.append(option.replace(annotation=hints[field]))
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters.append(inspect.Parameter("json", keyword, annotation=_Json, default=False))
    return [
        parameter.replace(kind=keyword, annotation=_of_typer(parameter.annotation))
        for parameter in parameters
    ], configs


def _of_typer(annotation: Any) -> Any:
    """An annotation whose `_config.Option` is an option of typer."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, about = get_args(annotation)
    if not isinstance(about, _config.Option):
        return annotation
    given = vars(about)
    if read := about.parser:

        def parse(text: str) -> object:
            try:
                return read(text)
            except InputError as error:
                raise typer.BadParameter(str(error)) from None

        given = given | {"parser": parse}
    return Annotated[kind, Option(**given)]


def _leave_process_group() -> None:
    """Joins gloo's threads, of which one can abort the interpreter as it exits. After an error
    other processes may be waiting, and NCCL would wait for the process that measures."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # the trainer, whose DistributedDataParallel holds the group
        dist.destroy_process_group()


def show_progress() -> bool:
    """Whether progress bars are worth printing: only a terminal overwrites them."""
    return sys.stderr.isatty()


def say(text: str, err: bool = False) -> None:
    """Prints sentences, broken between words at the width of the terminal."""
    from st_magnitude.result import wrap

    typer.echo(wrap(text), err=err)


class Warnings(logging.Handler):
    """Prints warnings of the package on stderr as the messages of commands."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # nobody reads stderr
            say(record.getMessage(), err=True)


def folder(help: str) -> OptionInfo:
    """An option that takes a folder, and refuses a file before anything is loaded."""

    def parse(given: str) -> Path:
        if given and Path(given).is_file():
            raise typer.BadParameter(f"{given!r} is a file.")
        return _path(given)

    return Option(parser=parse, metavar="DIRECTORY", help=help)


def _path(given: str) -> Path:
    if not given:  # typer takes nothing for the current folder
        raise typer.BadParameter(f"it is empty{_UNSET}")
    return Path(given)


def _report(given: str) -> Path:
    try:
        refuse_foreign(_path(given), OUR_PAGE)  # an earlier report may be replaced
    except OSError as error:
        raise typer.BadParameter(str(error)) from None
    return Path(given)


Report = Annotated[
    Path | None,
    Option(parser=_report, metavar="FILE", help="HTML file for a report; an old one is replaced."),
]


def save_report(
    path: Path | None,
    title: str,
    verdict: Verdict | None,
    settings: Mapping[str, object],
    seed: int,
) -> None:
    """Writes the report of ``--report``, if it was asked for."""
    if path is None:
        return
    if verdict is None:
        say("There is no report, as no held-out queries judge the model.")
        return
    from st_magnitude.workbench.report import write_report

    of = {system.name: system.ranking for system in verdict.systems}
    said = "\n".join(filter(None, (verdict.deploy, verdict.headline, verdict.no_control)))
    systems = [*verdict.systems, *verdict.controls.systems]
    write_report(path, title, said, systems, of[verdict.base], of[verdict.name], settings, seed)
    say(f"The report is in {path}.")
