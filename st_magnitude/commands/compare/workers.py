"""Who trains the candidates of a rung: this process, one after another, or the workers of a Ray cluster, side by side.

The candidates of a rung do not depend on each other, and the study has what a run that continues must know. Ray Tune
would bring a second scheduler and a second store for both, and its halving decides while the trials of a rung run.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from st_magnitude._ray import cluster, first_line
from st_magnitude.commands.compare.bench import Bench
from st_magnitude.commands.compare.candidates import Candidate
from st_magnitude.commands.compare.study import Measurement

__all__ = ["InTurn", "Job", "OnRay", "Workers", "workers_at"]


class Job(NamedTuple):
    """The arguments of `Bench.measured`."""

    candidate: Candidate
    steps: int
    keep: bool
    limit: float


class InTurn:
    """This process."""

    number = 1

    def measure(self, bench: Bench, jobs: Iterable[Job]) -> Generator[tuple[Candidate, Measurement], None, None]:
        """Yields what is measured; a job is asked for when a worker has time for it."""
        for job in jobs:
            yield job.candidate, bench.measured(*job)


class OnRay:
    """The workers of a Ray cluster: one for each of its GPUs, or for each CPU if it has no GPU."""

    def __init__(self, ray: Any) -> None:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        self.ray, self.number = ray, gpus or max(1, int(ray.cluster_resources().get("CPU", 1)))
        # A task whose worker dies is given to another one, three times.
        self.task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=3)(_measured)
        self.sent: Any = None

    def measure(self, bench: Bench, jobs: Iterable[Job]) -> Generator[tuple[Candidate, Measurement], None, None]:
        """As `InTurn.measure`, in the order in which the workers are done.

        Raises:
            OSError: If a training run fails, with its message.
        """
        if self.sent is None:
            bench.base.to("cpu")
            self.sent = self.ray.put(bench)
        waiting, running = iter(jobs), dict[Any, Candidate]()
        try:
            while True:
                while len(running) < self.number and (job := next(waiting, None)) is not None:
                    running[self.task.remote(self.sent, job)] = job.candidate
                if not running:
                    return
                done = self.ray.wait(list(running), num_returns=1)[0][0]
                measured = self.ray.get(done)
                yield running.pop(done), measured
        except self.ray.exceptions.RayError as error:
            raise OSError(f"A training run on Ray failed: {first_line(error)}") from error
        finally:
            for task in running:
                with suppress(self.ray.exceptions.RayError):
                    self.ray.cancel(task, force=True)


Workers = InTurn | OnRay


@contextmanager
def workers_at(address: str | None) -> Iterator[Workers]:
    if address is None:
        yield InTurn()
        return
    with cluster(address, "compare on a Ray cluster") as ray:
        yield OnRay(ray)


def _measured(bench: Bench, job: Job) -> Measurement:
    if not bench.output.is_dir():
        raise FileNotFoundError(
            f"{socket.gethostname()} does not see {bench.output}. The output must be on storage that all nodes share."
        )
    if torch.cuda.is_available():
        bench.base.to("cuda")
    return bench.measured(*job)
