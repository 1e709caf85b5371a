"""Python in processes of its own."""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
PATIENCE = 600  # seconds

# the one that forks has imported what takes most of a program's time, and nothing of ours
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
    return -1


def forked(*arguments, code=0, environment=None, cwd=".", **streams):
    """`python` in a tenth of the time, by a fork that has sentence-transformers already: with what
    that reads as it is imported, such as tqdm's variables. A stream is one of the functions above;
    by default stdin is empty, and the others are returned."""
    with tempfile.TemporaryDirectory() as folder:
        given = (list(map(str, arguments)), str(cwd), environment or {}, streams, folder)
        process = _FORKS.Process(target=_program, args=given)
        process.start()
        process.join(PATIENCE)
        process.kill()
        texts = {
            name: path.read_text() if (path := Path(folder, name)).exists() else ""
            for name in ("stdout", "stderr")
        }
    done = SimpleNamespace(returncode=process.exitcode, **texts)
    assert code is None or done.returncode == code, done.stdout[-2000:] + done.stderr[-5000:]
    return done


def _program(arguments, cwd, environment, streams, folder):
    """Runs ``-c CODE``, ``-m MODULE`` or a script, and ends the process as Python does."""
    os.chdir(cwd)
    os.environ.update({"OMP_NUM_THREADS": "1"} | environment)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        path, mode = (os.path.join(folder, name), "w") if number else (os.devnull, "r")
        opened = streams[name]() if name in streams else os.open(path, os.O_RDWR | os.O_CREAT)
        if opened < 0:
            os.close(number)
        else:
            os.dup2(opened, number)
        text = None if opened < 0 else os.fdopen(number, mode, encoding="utf-8", closefd=False)
        setattr(sys, name, text)
    kind, *rest = arguments
    is_script = kind not in ("-c", "-m")
    sys.argv = arguments if is_script else [kind, *rest[1:]]
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(kind).parent.resolve()) if is_script else cwd, *filter(None, paths)]
    status = 0
    try:
        if kind == "-c":
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        elif kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            status = 120
    os._exit(status)
