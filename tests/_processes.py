"""Python in processes of its own."""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
PATIENCE = 600  # seconds

STREAMS = ("stdin", "stdout", "stderr")

# The process that forks has imported what takes most of a program's time, and nothing of ours.
_FORKS = get_context("forkserver" if os.name == "posix" else "spawn")
_FORKS.set_forkserver_preload(["sentence_transformers"])


def python(*arguments, code=0, environment=None, **options):
    """A process that has ended, with this code unless it is None; one thread: sums in one order."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **options,
    )
    assert code is None or done.returncode == code, done.stdout[-2000:] + done.stderr[-5000:]
    return done


def nobody():
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def full_disk():
    return os.open("/dev/full", os.O_WRONLY)


def closed():
    return None


def forked(*arguments, code=0, environment=None, cwd=".", **streams):
    """`python` in a tenth of the time: a fork of a process that has imported sentence-transformers.
    Variables that are read at this import, such as tqdm's, have no effect.

    A stream can be one of the functions above. By default stdin is empty, and stdout and stderr are
    those of the result."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in STREAMS}
        for file in files.values():
            file.touch()
        opened = {name: partial(os.open, file, os.O_RDWR) for name, file in files.items()} | streams
        words = list(map(str, arguments))
        variables = {"OMP_NUM_THREADS": "1"} | (environment or {})
        process = _FORKS.Process(target=_program, args=(words, str(cwd), variables, opened))
        process.start()
        process.join(PATIENCE)
        process.kill()
        stdout, stderr = (files[name].read_text() for name in ("stdout", "stderr"))
    assert code is None or process.exitcode == code, stdout[-2000:] + stderr[-5000:]
    return SimpleNamespace(returncode=process.exitcode, stdout=stdout, stderr=stderr)


def _program(arguments, cwd, variables, opened):
    """Runs ``-c CODE``, ``-m MODULE`` or a script, and ends the process as Python does."""
    os.chdir(cwd)
    os.environ.update(variables)
    for number, name in enumerate(STREAMS):
        _redirect(number, name, opened[name]())
    try:
        _run(*arguments)
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            status = 120
    os._exit(status or 0)


def _redirect(number, name, opened):
    """Makes an open file, or None, a standard stream of this process."""
    if opened is None:
        os.close(number)
        setattr(sys, name, None)
        return
    os.dup2(opened, number)
    mode = "w" if number else "r"
    setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _run(kind, *rest):
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if kind == "-c":
        sys.path.insert(0, os.getcwd())
        sys.argv = [kind, *rest[1:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = [kind, *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).parent))
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")
