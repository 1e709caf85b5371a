"""Python in processes of its own."""

import os
import subprocess
import sys

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def python(*arguments, code=0, environment=None, **options):
    """A process that has ended, with this code unless it is None; one thread: sums in one order."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **options,
    )
    assert code is None or done.returncode == code, done.stdout[-2000:] + done.stderr[-5000:]
    return done
