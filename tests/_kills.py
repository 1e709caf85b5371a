"""Processes that are killed at a chosen step of their work on files."""

import multiprocessing
import os
import signal
import sys

STEPS = ("os.rename", "os.remove", "os.rmdir")


def killed_at(step, work):
    """The exit code of a process that SIGKILL ends before it renames or removes its n-th file."""

    def child():
        left = [step]

        def count(event, _):
            if event in STEPS:
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(count)
        work()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode
