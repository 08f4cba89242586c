"""What Ray itself costs the driver in a step: samples from replicas, the batch to the ranks,
log-probs back; and how many bytes travel.

    python -m benchmarks.overhead_ray --out DIR [--samples 8192] [--tokens 512] [--repeats 5]
        [--against CHECKOUT]

A local Ray with one actor. It stands in for all replicas (it sends the samples in one answer, or in
one answer per prompt) and for a rank (it takes the batch and returns log-probs of all of it).
Measured are medians of the CPU seconds of the driver's process and of the seconds until all is
there, and bytes as pickled. `--against`: another checkout, measured alternately with this one. The
rest of a step's cost is in `benchmarks.overhead`. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.common.command_line import Parser
from benchmarks.common.paths import ROOT
from benchmarks.common.processes import run_in_checkout
from benchmarks.common.report import markdown_table, write_results
from benchmarks.overhead.cell import SAMPLES_PER_PROMPT
from one_step_off.data.packing import PackedSamples, PackedShares
from one_step_off.data.samples import NOT_STORED, Batch, Sample
from one_step_off.training import trainer_group

PROMPT_TOKENS = 128
TOKEN_IDS = 32000

Figures = dict[str, float]


def random_samples(count: int, tokens: int) -> list[Sample]:
    """Random samples, each with a text of its own. The samples of a group share their prompt."""
    rng = np.random.default_rng(0)
    samples = []
    for row in range(count // SAMPLES_PER_PROMPT):
        prompt_ids = rng.integers(0, TOKEN_IDS, PROMPT_TOKENS, np.int32)
        for index in range(SAMPLES_PER_PROMPT):
            sample = Sample(
                (0, row),
                index,
                prompt_ids,
                rng.integers(0, TOKEN_IDS, tokens, np.int32),
                -rng.random(tokens, np.float32),
                np.ones(tokens, bool),
                np.zeros(tokens, np.int32),
                attempt=0,
                reward=1.0,
                finish_reason="stop",
                response=f"{row}.{index} " + "so it is 27 " * (tokens // 3),
            )
            samples.append(sample)
    return samples


class RemoteProcess:
    """The process at the other end: a replica with finished samples, and a rank."""

    def __init__(self, count: int, tokens: int) -> None:
        self.samples = random_samples(count, tokens)

    def all_samples(self) -> tuple[list[Sample], float]:
        """The samples of all prompts."""
        return PackedSamples(self.samples), 0.0

    def samples_of_prompt(self, row: int) -> tuple[list[Sample], float]:
        """The samples of one prompt."""
        first = row * SAMPLES_PER_PROMPT
        return PackedSamples(self.samples[first : first + SAMPLES_PER_PROMPT]), 0.0

    def receive(self, reference: list[Any]) -> float:
        """CPU seconds to get the batch. `reference` is in a list, else Ray would get it before."""
        import ray

        begin = time.process_time()
        batch = ray.get(reference[0])
        seconds = time.process_time() - begin
        assert len(batch.samples) == len(self.samples)
        return seconds

    def log_prob(self) -> dict[int, np.ndarray]:
        """Log-probs of all samples."""
        return PackedShares(enumerate(sample.log_probs for sample in self.samples))


def pickled_size(value: Any) -> Figures:
    """Bytes as pickled, and how many arrays Ray handles one by one."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    array_bytes = sum(array.raw().nbytes for array in arrays)
    return {"bytes": len(data) + array_bytes, "arrays": len(arrays)}


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[Figures, Any]:
    """Await the work. Returns its milliseconds on the clock and of the driver's CPU; and its
    result.
    """
    wall = time.perf_counter()
    cpu = time.process_time()
    result = await work()
    figures = {
        "ms": 1e3 * (time.perf_counter() - wall),
        "cpu_ms": 1e3 * (time.process_time() - cpu),
    }
    return figures, result


async def measure_once(remote: Any, count: int, tokens: int) -> tuple[dict[str, Figures], Batch]:
    """One repeat. Returns way -> figures; and the batch.

    Args:
        remote: the Ray actor.
        count: samples of a step.
        tokens: tokens of each sample.
    """

    async def by_prompt() -> list[Sample]:
        rows = range(count // SAMPLES_PER_PROMPT)
        answers = await asyncio.gather(*(remote.samples_of_prompt.remote(row) for row in rows))
        return [sample for samples, _ in answers for sample in samples]

    found: dict[str, Figures] = {}
    found["samples, one answer"], (samples, _) = await timed(remote.all_samples.remote)
    found["samples, one answer per prompt"], _ = await timed(by_prompt)
    advantages = [np.ones(tokens, np.float32) for _ in samples]
    batch = Batch(1, samples, (0, 0), advantages=advantages)

    async def put() -> Any:
        return trainer_group.put_batch(batch)

    found["batch to the object store"], reference = await timed(put)
    receive_s = await remote.receive.remote([reference])
    found["batch, in each rank"] = {"cpu_ms": 1e3 * receive_s}
    found["log-probs from the ranks"], _ = await timed(remote.log_prob.remote)
    return found, batch


async def measure(count: int, tokens: int, repeats: int) -> dict[str, Figures]:
    """Way -> medians. The first repeat warms up."""
    import ray

    remote: Any = ray.remote(RemoteProcess).remote(count, tokens)
    rounds = []
    for _ in range(repeats + 1):
        found, batch = await measure_once(remote, count, tokens)
        rounds.append(found)
    ways: dict[str, Figures] = {}
    for way, figures in rounds[0].items():
        ways[way] = {
            name: statistics.median(found[way][name] for found in rounds[1:]) for name in figures
        }
    log_probs = PackedShares(enumerate(sample.log_probs for sample in batch.samples))
    ways["samples, one answer"] |= pickled_size(PackedSamples(batch.samples))
    ways["batch to the object store"] |= pickled_size(stored_form(batch))
    ways["log-probs from the ranks"] |= pickled_size(log_probs)
    return ways


def stored_form(batch: Batch) -> Any:
    """What `trainer_group.put_batch` gives to Ray."""
    import ray

    batch.stored = NOT_STORED
    with mock.patch.object(ray, "put", lambda value: value):
        return trainer_group.put_batch(batch)


def _cells(figures: Figures) -> list[str]:
    milliseconds = f"{figures['ms']:.0f}" if "ms" in figures else ""
    cells = [f"{figures['cpu_ms']:.0f}", milliseconds]
    if "bytes" in figures:
        return [*cells, f"{figures['bytes'] / 1e6:.1f}", f"{figures['arrays']}"]
    return [*cells, "", ""]


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    arms = result["arms"]
    headings = ["of a step"]
    for arm in arms:
        headings += [f"{arm}: {unit}" for unit in ("CPU ms", "ms", "MB", "arrays")]
    rows = []
    for way in next(iter(arms.values())):
        row = [way]
        for ways in arms.values():
            row += _cells(ways[way])
        rows.append(row)
    lines = markdown_table(headings, rows)
    lines += ["", f"{result['samples']} samples of {result['tokens']} tokens.", ""]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--samples", type=int, default=8192, help="of a step")
    parser.add_argument("--tokens", type=int, default=512, help="of a sample")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout to measure as well")
    # How the benchmark calls itself in a process per checkout.
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        return args
    if not args.out or args.samples < SAMPLES_PER_PROMPT or args.samples % SAMPLES_PER_PROMPT:
        parser.error(f"--out is needed, and --samples in multiples of {SAMPLES_PER_PROMPT}")
    return args


def measure_here(args: argparse.Namespace) -> dict[str, Figures]:
    """Measure in this process, with a Ray of its own."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    return asyncio.run(measure(args.samples, args.tokens, args.repeats))


def main() -> None:
    """Measure each checkout and write the results."""
    args = arguments()
    if args.alone:
        print(json.dumps(measure_here(args)))
        return
    checkouts = {}
    if args.against:
        checkouts["before"] = args.against
    checkouts["now"] = ROOT
    sizes = {"samples": args.samples, "tokens": args.tokens, "repeats": args.repeats}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    arms = {}
    for arm, checkout in checkouts.items():
        module = "benchmarks.overhead.ray_transport"
        output = run_in_checkout(module, ["--alone", *flags], checkout.resolve())
        arms[arm] = json.loads(output)
    result = {"arms": arms, **sizes}
    args.out.mkdir(parents=True, exist_ok=True)
    markdown = table(result)
    write_results(args.out, result, markdown)
    print(markdown)


if __name__ == "__main__":
    main()
