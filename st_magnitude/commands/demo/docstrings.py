"""The API documentation of your own Python environment as a retrieval task.

Docstrings of the installed packages and the standard library are parsed with :mod:`ast`; nothing is imported or run.

- A *query* is the summary of a public module, class, function or method, as a question that does not name the object.
- Its *relevant* documents are the chunks of the description: the paragraphs and notes after the summary.
- Its *negatives* are the chunks of its parameter, return, exception, see-also, reference and example sections
  (numpydoc, Google and Sphinx styles). They belong to the right object, but do not say what it is for: never relevant.

Only objects with both kinds of chunks take part, and no chunk repeats its query.

The split is by package, and a docstring that resembles one of the test packages' is kept out of the other splits.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import random
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tqdm import tqdm

from st_magnitude._json import parse
from st_magnitude.corpus.beir import DataError, RetrievalData, load_beir, save_beir

__all__ = ["DocstringTask", "DocumentedObject", "build_docstring_task", "documented_objects", "split_docstring"]


@dataclass(frozen=True)
class DocumentedObject:
    """What the task uses of one docstring.

    Attributes:
        name: Qualified name, such as ``scipy.optimize._minimize.minimize``.
        query: The summary as a question.
        relevant: Chunks of the description.
        boilerplate: Chunks of the other sections.
    """

    name: str
    query: str
    relevant: tuple[str, ...]
    boilerplate: tuple[str, ...]

    @property
    def package(self) -> str:
        """The top-level package, or ``"stdlib"``."""
        return self.name.partition(".")[0]


@dataclass
class DocstringTask:
    """Three retrieval tasks over disjoint packages.

    Attributes:
        train: For fine-tuning.
        dev: For choosing, such as the document exponent at inference.
        test: For the final figures. ``test.negatives`` has every document of its corpus that is never relevant.
        packages: Split to the number of queries of each of its packages.
    """

    train: RetrievalData
    dev: RetrievalData
    test: RetrievalData
    packages: dict[str, dict[str, int]]


_MINIMUM = {"train": 500, "dev": 100, "test": 200}  # queries; with fewer, a difference is noise


def build_docstring_task(
    train: Sequence[str] | None = None,
    dev: str | Sequence[str] = "pandas",
    test: str | Sequence[str] = ("scipy", "networkx", "sklearn"),
    *,
    train_queries: int = 3400,
    dev_queries: int = 150,
    test_queries: int = 450,
    max_files: int = 160,
    max_words: int = 60,
    seed: int = 0,
    roots: Sequence[str | Path] | None = None,
    workers: int | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
) -> DocstringTask:
    """Build the task from the packages of this environment; the same environment and seed give the same task.

    Args:
        train: Packages to train on (import names; ``"stdlib"`` is the standard library); default: all others.
        dev: Packages for choosing hyperparameters.
        test: Packages for evaluation.
        train_queries: At most so many, drawn evenly from the packages, so that no large one dominates.
        dev_queries: Likewise.
        test_queries: Likewise.
        max_files: Read at most so many files of each package (a seeded sample).
        max_words: The length of a chunk.
        seed: Of all sampling.
        roots: Folders that hold packages; default: the running interpreter's site-packages and standard library.
        workers: Processes that parse; default: one per CPU on Linux, none besides this one elsewhere.
        cache: Keep the task in this folder (``train/``, ``dev/`` and ``test/`` in BEIR's layout) and read it from
            there when neither arguments nor installed packages have changed.
        progress: Show a progress bar.

    Raises:
        DataError: If a named package is not installed, named twice, or a split has too few queries: 500, 100 and 200
            for train, dev and test, or as many as asked for when that is less.

    Example:
        >>> task = build_docstring_task()  # doctest: +SKIP
        >>> task.test  # doctest: +SKIP
        RetrievalData(450 queries, 2,248 documents, 718 relevant pairs, 1,610 judged negatives)
    """
    dev, test = ([names] if isinstance(names, str) else list(names) for names in (dev, test))
    sizes = {"test": test_queries, "dev": dev_queries, "train": train_queries}
    settings = {
        "packages": [None if train is None else list(train), dev, test],
        "numbers": [*sizes.values(), max_files, max_words, seed],
        "environment": _fingerprint(roots),
    }
    if cache is not None and (cached := _load(Path(cache), settings)):
        return cached

    files = _package_files(roots)
    if train is None:
        train = [name for name in files if name not in (*dev, *test)]
    packages = {"test": test, "dev": dev, "train": list(train)}  # a near-duplicate belongs to the first of them
    _check_packages(packages, files)

    jobs: list[tuple[str, Path, Path]] = []
    for name in (*test, *dev, *train):
        root, paths = files[name]
        if len(paths) > max_files:
            paths = sorted(random.Random(f"{seed} {name}").sample(paths, max_files))
        jobs += [(name, root, path) for path in paths]
    objects = _drop_duplicates(_read_files(jobs, max_words, workers, progress))

    data: dict[str, RetrievalData] = {}
    counts: dict[str, dict[str, int]] = {}
    for split in packages:
        available = [[o for o in objects if o.package == name] for name in packages[split]]
        chosen, minimum = _draw_evenly(available, sizes[split], seed), min(_MINIMUM[split], sizes[split])
        if len(chosen) < minimum:
            raise _too_little(split, {n: len(o) for n, o in zip(packages[split], available, strict=True)}, minimum)
        data[split] = _retrieval_data(chosen)
        counts[split] = dict(sorted(Counter(o.package for o in chosen).items()))
    task = DocstringTask(data["train"], data["dev"], data["test"], counts)
    if cache is not None:
        _save(task, Path(cache), settings)
    return task


# ---------------------------------------------------------------------------------------------------------------------
# Files of the environment
# ---------------------------------------------------------------------------------------------------------------------

_SKIPPED_FOLDER = re.compile(
    r"__pycache__|_vendor|vendor|vendored|_vendored|_distutils|externals|extern|third_party|site-packages|"
    r"dist-packages|test|tests|testing|conftest|testdata|idlelib|lib2to3|ensurepip|turtledemo|pydoc_data|"
    r"node_modules"
)
_MAX_BYTES = 600_000  # larger files are generated tables
_DISTRIBUTION = {"sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}  # import name to what pip calls it


def _package_files(roots: Sequence[str | Path] | None) -> dict[str, tuple[Path, list[Path]]]:
    """Package name to the folder that its module names start in and its source files, all sorted."""
    found: dict[str, tuple[Path, list[Path]]] = {}
    if roots is None:
        paths = sysconfig.get_paths()
        roots = [*sys.path, paths["purelib"], paths["platlib"]]
        roots = [root for root in roots if Path(root).name in ("site-packages", "dist-packages")]
        library = Path(paths["stdlib"])
        found["stdlib"] = (
            library,
            [path for path in _sources(library) if _is_public(path.relative_to(library).parts[0])],
        )
    for root in map(Path, roots):
        for package in sorted(root.iterdir()) if root.is_dir() else ():
            name = package.name
            if name in found or name == "st_magnitude" or not (package / "__init__.py").is_file():
                continue
            if name.isidentifier() and _is_public(name) and not _SKIPPED_FOLDER.fullmatch(name):
                found[name] = (root, _sources(package))
    return {name: found[name] for name in sorted(found)}


def _sources(folder: Path) -> list[Path]:
    """Source files below a folder, sorted, without tests and vendored copies of other packages."""
    sources: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _SKIPPED_FOLDER.fullmatch(name))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith(("test_", "conftest")):
                sources.append(Path(parent, name))
    return [path for path in sources if path.stat().st_size <= _MAX_BYTES]


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _fingerprint(roots: Sequence[str | Path] | None) -> str:
    """Changes with the interpreter, the installed distributions and the roots."""
    installed = sorted(f"{d.name}=={d.version}" for d in distributions())
    text = repr((sys.version, installed, None if roots is None else [str(root) for root in roots]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pip_install(packages: Iterable[str]) -> str:
    return "pip install " + " ".join(sorted({_DISTRIBUTION.get(name, name) for name in packages}))


def _check_packages(packages: Mapping[str, Sequence[str]], files: Mapping[str, object]) -> None:
    named = [name for names in packages.values() for name in names]
    if twice := sorted(name for name, count in Counter(named).items() if count > 1):
        raise DataError(f"{twice[0]!r} is named twice in train, dev and test: a package belongs to one split.")
    if missing := [name for name in named if name not in files]:
        raise DataError(
            f"No source files of {', '.join(missing)} among the {len(files)} packages found "
            f"({', '.join(files) or 'none'}). {_pip_install(missing)}, or name other packages."
        )


def _too_little(split: str, found: Mapping[str, int], minimum: int) -> DataError:
    counts = ", ".join(f"{name} {count:,}" for name, count in found.items()) or "no packages"
    return DataError(
        f"The {split} split needs {minimum} documented objects, found {sum(found.values()):,} ({counts}). "
        'pip install "st-magnitude[demo]" brings enough of them; or name further packages, or raise max_files.'
    )


# ---------------------------------------------------------------------------------------------------------------------
# From files to documented objects
# ---------------------------------------------------------------------------------------------------------------------


_MIN_JOBS_FOR_POOL = 100


def _read_files(
    jobs: Sequence[tuple[str, Path, Path]], max_words: int, workers: int | None, progress: bool
) -> list[DocumentedObject]:
    """Documented objects of all files, in their order."""
    arguments = [(name, root, path, max_words) for name, root, path in jobs]
    workers = ((os.cpu_count() or 1) if sys.platform == "linux" else 1) if workers is None else workers
    bar: dict[str, Any] = {"total": len(jobs), "desc": "Reading docstrings", "unit": "file", "disable": not progress}
    if workers <= 1 or len(jobs) < _MIN_JOBS_FOR_POOL:
        return [found for objects in tqdm(map(_read_file, arguments), **bar) for found in objects]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside torch's threads: the children only parse
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            results = pool.map(_read_file, arguments, chunksize=16)
            return [found for objects in tqdm(results, **bar) for found in objects]


_HAS_SECTIONS = re.compile(
    rb">>> |^ *(?:[:@](?:param|arg|return|raise)|(?:Parameter|Arg|Return|Example|Raise|Refer)\w*:?$)", re.M
)


def _read_file(job: tuple[str, Path, Path, int]) -> list[DocumentedObject]:
    package, root, path, max_words = job
    parts = [part for part in path.relative_to(root).with_suffix("").parts if part != "__init__"]
    try:
        source = path.read_bytes()
        if not _HAS_SECTIONS.search(source):  # saves parsing half of the files
            return []
        return list(documented_objects(source, ".".join(parts), package, max_words))
    except (SyntaxError, ValueError, RecursionError, OSError):  # Python of another version, a template, a null byte
        return []


def documented_objects(
    source: str | bytes, module: str, package: str | None = None, max_words: int = 60
) -> Iterator[DocumentedObject]:
    """The public, usefully documented objects of a module's source, which is parsed and never run.

    Args:
        source: Python source code.
        module: Its dotted name.
        package: What names start with; default: the module's top-level package.
        max_words: The length of a chunk.

    Raises:
        SyntaxError: If the source is no Python of this version.

    Example:
        >>> source = '''
        ... def smooth(signal, width):
        ...     \"\"\"Remove noise from a noisy recording.
        ...
        ...     Every sample becomes the mean of the samples around it, so that sharp edges are lost as well.
        ...
        ...     Args:
        ...         signal: The samples, an array of shape (n,), in order of their time.
        ...         width: The number of samples.
        ...     \"\"\"
        ... '''
        >>> for found in documented_objects(source, "audio"):
        ...     print(found.name, found.query, found.relevant, found.boilerplate, sep="\\n")
        audio.smooth
        how do I remove noise from a noisy recording?
        ('Every sample becomes the mean of the samples around it, so that sharp edges are lost as well.',)
        ('signal: The samples, an array of shape (n,), in order of their time. width: The number of samples.',)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(source)
    top = package or module.partition(".")[0]
    prefix = module if module.partition(".")[0] == top else f"{top}.{module}"
    for name, node in _public_nodes(tree, prefix):
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None or len(docstring.split()) < 2 * _MIN_WORDS or _TEMPLATE.search(docstring):
            continue
        docstring = inspect.cleandoc(docstring)
        summary, *_ = split_docstring(docstring.partition("\n\n")[0])
        query = _as_query(summary, name.rpartition(".")[2])
        if query is None:
            continue
        _, description, boilerplate = split_docstring(docstring, max_words)
        core = _normalised(_QUESTION.sub("", query))
        relevant = tuple(chunk for chunk in description if core not in _normalised(chunk))[:_MAX_RELEVANT]
        never = tuple(chunk for chunk in boilerplate if core not in _normalised(chunk))[:_MAX_BOILERPLATE]
        if relevant and never:
            yield DocumentedObject(name, query, relevant, never)


def _public_nodes(
    node: ast.Module | ast.ClassDef, name: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    yield name, node
    for child in node.body:
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not _is_public(child.name):
            continue
        if isinstance(child, ast.ClassDef):
            yield from _public_nodes(child, f"{name}.{child.name}")
        else:
            yield f"{name}.{child.name}", child


# ---------------------------------------------------------------------------------------------------------------------
# From a docstring to summary, description and boilerplate
# ---------------------------------------------------------------------------------------------------------------------

_MAX_RELEVANT, _MAX_BOILERPLATE, _MAX_SECTION = 3, 5, 2  # chunks of one object, and of one of its sections
_MIN_WORDS = 8  # of a chunk: below, it is a fragment

_SECTIONS = (
    r"(?:other |optional |additional |class |keyword |input |output )?"
    r"(?:param(?:eter)?s?|arg(?:ument)?s?|kwargs|attributes?|methods|properties|returns?|yields?|receives|raises|"
    r"exceptions?|warns|see[ -]also|related|references?|citations?|examples?|example usage|usage(?: examples?)?|"
    r"basic usage|doctests?|inputs?|outputs?|shapes?|fields|options|routine listings|authors?|copyright|license|"
    r"call signatures?|signature|todo|links?|expected output|default config|tests?|types?|dtypes?)"
)
_HEADING = re.compile(rf"(?:[*_]{{2}})?{_SECTIONS}\s*:?(?:[*_]{{2}})?", re.I)  # over a line of dashes
_GOOGLE = re.compile(rf"(?:[*_#]{{2,}} *)?(?=[A-Z])(?i:{_SECTIONS})(?:[*_]{{2}})?:{{1,2}}(?:[*_]{{2}})?(?:\s+(.*))?")
_PROSE_GOOGLE = re.compile(r"(?:notes?|warnings?|tips?|description|explanation|details)\s*:{1,2}", re.I)
_ADORNMENT = re.compile(r"([-=~^*#+._])\1{2,}")
_FIELD = re.compile(
    r"[:@](?:\w*param\w*|arg\w*|type|returns?|rtype|raises?|except\w*|key\w*|[ic]?var|yields?|meta|see)\b.*"
)
_DIRECTIVE = re.compile(r"\.\. ([\w:-]+)::\s*(.*)")
_PROSE_DIRECTIVE = re.compile(r"note|warning|tip|hint|important|attention|caution|danger|admonition|topic")
_BOILERPLATE_DIRECTIVE = re.compile(
    r"code|code-block|sourcecode|ipython|plot|doctest|testcode|parsed-literal|prompt|highlight|seealso|autosummary"
)
_TABLE = re.compile(r"[-=+|\s:]{4,}|\|.*\||[+|].*[+|]")
_TEMPLATE = re.compile(r"%\(\w+\)s|\{\{|(?<![\\\w}^_$ {'\"])\{[a-z_]+\}|^\{\w+\}$", re.M)

_DEBRIS = re.compile(
    r"\(?(?:please |also |but |and )*(?:see|refer to|cf\.?|compare|consult)\b.{0,140}$"
    r"|(?:for|more|further|full|additional|detailed|complete) (?:more |further |additional |full |complete |a |the )*"
    r"(?:details?|information|documentation|descriptions?|examples?|explanations?|usage|list)\b.{0,60}"
    r"\b(?:see|refer|can be found|is available|are available|visit|check|in the)\b.*$"
    r"|(?:read|learn|find)(?: \w+)? (?:more|out) .{0,120}$"
    r"|.{0,60}\b(?:deprecated|new in version|(?:removed|added) in (?:version|v?\d)|changed in version)\b.*$"
    r"|(?:an? )?(?:alias|synonym|shorthand|shortcut|equivalent|identical|inherited|same) (?:of|for|to|as|from)\b"
    r".{0,60}$"
    r"|(?:this|the) (?:function|method|class|docstring|page|section) (?:was|is) (?:copied|inherited|an alias)\b.*$"
    r"|(?:copyright|licensed under|author:|version:|todo|fixme|xxx)\b.*$",
    re.I,
)


def split_docstring(docstring: str, max_words: int = 60) -> tuple[str, list[str], list[str]]:
    """Take a docstring apart: numpydoc, Google, Sphinx and Markdown conventions.

    Args:
        docstring: As :func:`inspect.getdoc` returns it, or raw.
        max_words: The length of a chunk; chunks below eight words are left out as fragments.

    Returns:
        The first sentence; chunks of the description (what follows, notes included); chunks of the sections for
        parameters, returned values, exceptions, cross-references, literature and examples, and of code samples.
        Mark-up is taken out; cross-references ("See foo for details"), deprecations and version notes are dropped.

    Example:
        >>> split_docstring("Add two numbers.\\n\\nOverflow wraps around silently, as it does in C, for all "
        ...                 "integer types.\\n\\n:param a: The first of the two numbers, an integer.")
        ... # doctest: +NORMALIZE_WHITESPACE
        ('Add two numbers.', ['Overflow wraps around silently, as it does in C, for all integer types.'],
         ['a: The first of the two numbers, an integer.'])
    """
    description: list[str] = []  # sentences; the first is the summary
    boilerplate: list[str] = []
    entries: list[str] = []  # of the current section, and of short ones before it
    for is_boilerplate, lines in _blocks(inspect.cleandoc(docstring).splitlines()):
        if is_boilerplate:
            entries += [_plain(entry) for entry in _entries(lines)]
            if len(" ".join(entries).split()) >= _MIN_WORDS:
                chunks = _pack(entries, max_words)[:_MAX_SECTION]
                boilerplate += [chunk for chunk in chunks if len(chunk.split()) >= _MIN_WORDS]
                entries = []
        else:
            for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*•] )", "\n".join(lines)):
                description += filter(None, _SENTENCE_END.split(re.sub(r"^[-*•] ", "", _plain(paragraph))))
    summary, rest = (description[0], description[1:]) if description else ("", [])
    prose = _pack((s for s in rest if not _DEBRIS.match(s)), max_words)
    return summary, [chunk for chunk in prose if _is_prose(chunk)], boilerplate


def _blocks(lines: Sequence[str]) -> list[tuple[bool, list[str]]]:
    """Runs of lines and whether they are boilerplate."""
    blocks: list[tuple[bool, list[str]]] = [(False, [])]
    section = False  # whether the current numpydoc section is boilerplate
    ends_at_text = False  # a Google section or field list ends at flush text after a blank line
    blank = True
    i = 0

    def start(is_boilerplate: bool, *first: str) -> None:
        blocks.append((is_boilerplate, list(first)))

    while i < len(lines):
        line, text = lines[i], lines[i].strip()
        indent = len(line) - len(line.lstrip())
        below = lines[i + 1].strip() if i + 1 < len(lines) else ""
        after_blank, blank = blank, not text
        i += 1
        if _ADORNMENT.fullmatch(text):
            continue
        if ends_at_text and text and indent == 0 and after_blank:
            ends_at_text = False
            start(section)
        if text and _ADORNMENT.fullmatch(below) and len(below) >= min(len(text), 4) and indent <= 4:
            section, ends_at_text = bool(_HEADING.fullmatch(text)), False
            start(section)
        elif (match := _GOOGLE.fullmatch(text)) and indent <= 4 and (indent == 0 or after_blank):
            ends_at_text = True
            start(True, *([match[1]] if match[1] else []))
        elif _PROSE_GOOGLE.fullmatch(text) and indent == 0:
            ends_at_text = False
            start(section)
        elif _FIELD.fullmatch(text):
            if not (ends_at_text and blocks[-1][0]):
                start(True)
            ends_at_text = True
            blocks[-1][1].append(line)
        elif match := _DIRECTIVE.fullmatch(text):
            body, i = _indented(lines, i, indent)
            kind = match[1].rpartition(":")[2]
            current = blocks[-1][0]
            if kind == "rubric":
                section = bool(_HEADING.fullmatch(match[2]))
                start(section)
            elif _PROSE_DIRECTIVE.fullmatch(kind):
                blocks[-1][1].extend(["", *inspect.cleandoc("\n".join(["", *body])).splitlines(), ""])
            elif _BOILERPLATE_DIRECTIVE.fullmatch(kind):
                start(True, *(row for row in body if not re.match(r"\s*:[\w-]+:", row)))
                start(current)
        elif text.startswith(".. [") or (text.startswith("[") and re.match(r"\[\w+\] +[A-Z]", text)):
            body, i = _indented(lines, i, indent)
            current = blocks[-1][0]
            start(True, text.removeprefix(".. "), *body)
            start(current)
        elif text == ".." or text.startswith(".. "):
            _, i = _indented(lines, i, indent)
        elif text.startswith(("```", "~~~")):
            end = next((j for j in range(i, len(lines)) if lines[j].strip().startswith(text[:3])), len(lines))
            current = blocks[-1][0]
            start(True, *lines[i:end])
            start(current)
            i = end + 1
        elif text.startswith((">>>", "In [")) and not blocks[-1][0]:
            end = next((j for j in range(i, len(lines)) if not lines[j].strip()), len(lines))
            current = blocks[-1][0]
            start(True, *lines[i - 1 : end])
            start(current)
            i = end
        elif text.endswith("::") and not blocks[-1][0]:
            body, i = _indented(lines, i, indent)
            current = blocks[-1][0]
            blocks[-1][1].append(line.rstrip(": ") + ("." if len(text) > 2 else ""))
            start(True, *body)
            start(current)
        elif _TABLE.fullmatch(text) and len(text) > 3:
            continue
        else:
            blocks[-1][1].append(line)
    return [(kind, block) for kind, block in blocks if any(map(str.strip, block))]


def _indented(lines: Sequence[str], i: int, indent: int) -> tuple[list[str], int]:
    """The lines from i on that are blank or indented by more than ``indent``, and where they end."""
    end = i
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent):
        end += 1
    return list(lines[i:end]), end


def _entries(lines: Sequence[str]) -> list[str]:
    """Entries of a section: each starts at the smallest indentation."""
    lines = [line for line in lines if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    smallest = min(indents, default=0)
    entries: list[str] = []
    for line, indent in zip(lines, indents, strict=True):
        if not entries or indent == smallest:
            entries.append(line)
        else:
            entries[-1] += f" {line.strip()}"
    return entries


_MARKUP = (
    (re.compile(r"</?[a-zA-Z][^<>\n]{0,80}>"), " "),  # HTML
    (re.compile(r"!?\[([^\[\]]*)\]\((?:[^()]|\([^()]*\))*\)"), r"\1"),  # [text](target)
    (re.compile(r"\[?(?::[\w:+-]+:)?`+~(?:[^`<>]*\.)?([^`.]*)`+\]?"), r"\1"),  # :class:`~module.Name`
    (re.compile(r"(?::[\w:+-]+:)?`+!?([^`<>]+?)\s*<[^`>]+>`+_{0,2}"), r"\1"),  # :ref:`text <target>`, `text <url>`_
    (re.compile(r":(?!param|type|return|rtype|raise)[a-z][\w:+-]*:(?=`)"), ""),  # :role:
    (re.compile(r"\[`+([^`]*)`+\]"), r"\1"),  # [`Name`]
    (re.compile(r"`+~?([^`]*)`+_{0,2}"), r"\1"),  # `code`
    (re.compile(r"\s?\[[#\w*]{1,12}\]_"), ""),  # [1]_
    (re.compile(r"(?<![\w*])\*{1,2}(?=\S)([^*]+?)(?<=\S)\*{1,2}(?![\w*])"), r"\1"),  # *emphasis*
    (re.compile(r"^[:@](?:param|parameter|type|arg|argument|raises?|key\w*|[ic]?var)\s+", re.M), ""),  # :param x:
    (re.compile(r"^[:@](r(?:eturns?|type)|yields?):", re.M), r"\1:"),
    (re.compile(r"^\s*(?:[>.]{3}|In \[\d+\]:)(?= |$)", re.M), ""),  # doctest prompts
    (re.compile(r" (?:>>>|\.\.\.)(?= )"), ""),
    (re.compile(r"^\s*>(?: |$)(?:\[!\w+\])?", re.M), ""),  # quoted lines
    (re.compile(r"\s+"), " "),
)


def _plain(text: str) -> str:
    """Text without reStructuredText and Markdown mark-up, on one line."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)(?<!cf\.)\)?\s+(?=[\"'(\[]?[A-Z0-9])")


def _pack(pieces: Iterable[str], max_words: int) -> list[str]:
    """Join pieces to chunks of at most ``max_words`` words; a longer piece is cut."""
    chunks: list[list[str]] = [[]]
    for piece in pieces:
        words = piece.split()
        if chunks[-1] and len(chunks[-1]) + len(words) > max_words:
            chunks.append([])
        chunks[-1] += words
        while len(chunks[-1]) > max_words:
            chunks[-1:] = [chunks[-1][:max_words], chunks[-1][max_words:]]
    return [" ".join(words) for words in chunks if words]


def _is_prose(chunk: str) -> bool:
    """Whether a chunk reads as text: enough words, most of them in letters."""
    words = chunk.split()
    plain = sum(word.strip(".,;:()!?'\"-").isalpha() for word in words)
    return len(words) >= _MIN_WORDS and plain >= 0.7 * len(words)


# ---------------------------------------------------------------------------------------------------------------------
# From a summary to a query
# ---------------------------------------------------------------------------------------------------------------------

_VERB = re.compile(
    r"(accept|add|adjust|align|allow|append|apply|approximate|assemble|assign|attach|bind|build|calculate|call|change|check|"
    r"choose|clear|clip|close|collect|combine|compare|compile|compute|concatenate|configure|connect|construct|convert|copy|"
    r"count|create|decide|declare|decode|decompose|define|delete|describe|detect|determine|disable|display|divide|download|"
    r"draw|drop|embed|enable|encode|ensure|enumerate|escape|estimate|evaluate|execute|expand|export|extend|extract|factorize|"
    r"fetch|fill|find|fit|flatten|format|gather|generate|get|give|group|handle|identify|implement|import|indicate|infer|"
    r"initialize|insert|instantiate|integrate|interpolate|invert|iterate|join|keep|learn|list|load|locate|log|make|map|mark|"
    r"mask|measure|merge|minimize|modify|move|multiply|normalize|obtain|open|pad|parse|partition|perform|pick|plot|predict|"
    r"prepare|print|process|produce|provide|query|raise|read|record|reduce|register|remove|rename|render|reorder|repeat|"
    r"replace|represent|reset|reshape|resize|resolve|restore|retrieve|return|reverse|rotate|run|sample|save|search|select|"
    r"send|serialize|set|show|shuffle|simulate|solve|sort|split|stack|start|stop|store|strip|sum|swap|take|test|tokenize|"
    r"track|train|transform|translate|traverse|try|update|upload|validate|verify|wait|wrap|write|yield)(?:e?s)?"
)
_WHETHER = re.compile(r"^(?:returns?|indicates?) (?:(?:true|a boolean) (?:if and only if|iff|if|when)|whether)\b", re.I)
_QUESTION = re.compile(r"^(?:how do I \w+|what is) ")
_NO_QUERY = re.compile(
    r"^(?:deprecated|internal|private|helper|see|alias|same|todo|fixme|note|warning|mixin|initiali[sz]e self|overrid"
    r"|this |subclass|base class|abstract|equivalent|inherit|if |when |for |example|default|called |test|dummy|stub"
    r"|not |it |wrap|implementation of|version of|like |legacy|use |these |copyright|created|author|we |you "
    r"|\(?property|discouraged)|\b(?:deprecated|docstring)\b|::|>>>|->|[={}<>\\|]|\w\(",
    re.I,
)


def _as_query(summary: str, name: str) -> str | None:
    """The summary as a question without the object's own name; None when it would not make a useful one.

    A leading "name:" and a parenthesised "(name)" are taken out; a summary that needs the name elsewhere is useless.
    """
    if _names(summary, name):
        own = rf"`*{_spellings(name)}(?:\([^)]*\))?`*"
        summary = re.sub(rf"^{own}\s*(?:[:,–—-]+|->|\bis\b)\s+|\s*\(\s*{own}\s*\)", "", summary, flags=re.I)
    summary = _WHETHER.sub("check whether", summary.rstrip(" .:;!?"))
    words = summary.split()
    letters = sum(word.strip(".,;:()!?'\"-").isalpha() for word in words)
    if not 4 <= len(words) <= 25 or letters < 0.7 * len(words) or _NO_QUERY.search(summary) or _names(summary, name):
        return None
    first, rest = words[0], " ".join(words[1:])
    if verb := _VERB.fullmatch(first.lower()):
        return f"how do I {'get' if verb[1] == 'return' else verb[1]} {rest}?"
    if first[1:].islower() or len(first) == 1:
        first = first.lower()
    return f"what is {first} {rest}?" if first in ("a", "an", "the") else f"{first} {rest}"


def _names(text: str, name: str) -> bool:
    """Whether a text holds a name in any of its spellings: ``KMeans`` as ``kmeans``, ``k-means`` or ``K means``.

    Example:
        >>> _names("Cluster by K-means.", "KMeans"), _names("Cluster by the mean.", "KMeans")
        (True, False)
    """
    bare = re.compile(r"[\W_]+")
    if bare.sub("", name).lower() not in bare.sub("", text).lower():  # saves the compilation of a pattern
        return False
    return re.search(_spellings(name), text, re.I) is not None


def _spellings(name: str) -> str:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name) or [name]
    return r"(?<![A-Za-z0-9])" + r"[\W_]*".join(map(re.escape, parts)) + r"s?(?![A-Za-z0-9])"


def _normalised(text: str) -> str:
    """Lower-cased words and digits, separated by single spaces."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


# ---------------------------------------------------------------------------------------------------------------------
# From documented objects to retrieval data
# ---------------------------------------------------------------------------------------------------------------------


def _drop_duplicates(objects: Sequence[DocumentedObject]) -> list[DocumentedObject]:
    """Without twins and near-duplicates of earlier objects, by query and by description."""
    kept = list(objects)
    for texts in ([o.query for o in kept], [" ".join(o.relevant) for o in kept]):
        unlike = _unlike_earlier([frozenset(_normalised(text).split()) for text in texts])
        duplicate = {id(o) for o, keep in zip(objects, unlike, strict=True) if not keep}
        kept = [o for o in kept if id(o) not in duplicate]
    return kept


def _unlike_earlier(sets: Sequence[frozenset[str]], threshold: float = 0.8) -> list[bool]:
    """For each set of words, whether its Jaccard similarity with every earlier kept one is below the threshold.

    Prefix filtering: with words ordered by rarity, similar sets share one of the first ``n - ceil(t n) + 1``.
    """
    frequency = Counter(word for words in sets for word in words)
    with_prefix: dict[str, list[frozenset[str]]] = {}
    unlike: list[bool] = []
    for words in sets:
        ordered = sorted(words, key=lambda word: (frequency[word], word))
        prefix = ordered[: len(words) - math.ceil(threshold * len(words)) + 1]
        candidates = (other for word in prefix for other in with_prefix.get(word, ()))
        unlike.append(not any(len(words & other) >= threshold * len(words | other) for other in candidates))
        if unlike[-1]:
            for word in prefix:
                with_prefix.setdefault(word, []).append(words)
    return unlike


def _draw_evenly(packages: Sequence[Sequence[DocumentedObject]], size: int, seed: int) -> list[DocumentedObject]:
    """At most ``size`` objects, one of each package in turn, in a seeded order."""
    rng = random.Random(seed)
    shuffled = [rng.sample(objects, len(objects)) for objects in packages]
    return [o for row in zip_longest(*shuffled) for o in row if o is not None][:size]


def _retrieval_data(objects: Sequence[DocumentedObject]) -> RetrievalData:
    """One query an object over the chunks of all; equal chunks are one document, and relevant if they are so to any."""
    described = {chunk for o in objects for chunk in o.relevant}
    identifiers: dict[str, str] = {}
    queries: dict[str, str] = {}
    relevant: dict[str, set[str]] = {}
    negatives: dict[str, set[str]] = {}
    for o in objects:
        queries[o.name] = o.query
        chunks = (*o.relevant, *(chunk for chunk in o.boilerplate if chunk not in described))
        documents = [identifiers.setdefault(chunk, f"{o.name}#{i}") for i, chunk in enumerate(chunks)]
        relevant[o.name] = set(documents[: len(o.relevant)])
        if len(documents) > len(o.relevant):
            negatives[o.name] = set(documents[len(o.relevant) :])
    return RetrievalData(queries, {key: chunk for chunk, key in identifiers.items()}, relevant, negatives)


# ---------------------------------------------------------------------------------------------------------------------
# Cache
# ---------------------------------------------------------------------------------------------------------------------


def _save(task: DocstringTask, folder: Path, settings: Mapping[str, object]) -> None:
    for split in ("train", "dev", "test"):
        save_beir(getattr(task, split), folder / split, split)
    text = json.dumps({"settings": settings, "packages": task.packages}, indent=2)
    (folder / "task.json").write_text(text + "\n", encoding="utf-8")


def _load(folder: Path, settings: Mapping[str, object]) -> DocstringTask | None:
    """The task in the folder if it was built with the same settings."""
    try:
        saved = parse((folder / "task.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(saved, dict) or saved.get("settings") != settings or "packages" not in saved:
        return None
    train, dev, test = (load_beir(folder / split, split) for split in ("train", "dev", "test"))
    return DocstringTask(train, dev, test, saved["packages"])
