"""What Ray itself costs the driver in a step: samples from replicas, the batch to the ranks, log-probs back; and bytes.

    python -m benchmarks.overhead_ray --out DIR [--samples 8192] [--tokens 512] [--repeats 5] [--against CHECKOUT]

A local Ray with one actor, which stands in for all replicas (samples of one answer, or of one answer per prompt) and for
a rank (it takes the batch and gives log-probs of all of it). CPU seconds of the driver's process, seconds until all is
there, and bytes as pickled, medians. `--against`: another checkout, by turns with this one. The rest of a step's cost is
in `benchmarks.overhead`. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.data import samples
from one_step_off.data.samples import NOT_STORED, Batch, Sample
from one_step_off.training import trainer_group as groups

ROOT = Path(__file__).parents[2]
GROUP = 8  # samples of a prompt
# Before there were such classes, plain lists and dicts travelled.
SAMPLES, SHARES = getattr(samples, "Samples", list), getattr(samples, "Shares", dict)


def made(count: int, tokens: int) -> list[Sample]:
    """Random samples, groups of which share their prompt, each with a text of its own."""
    rng, found = np.random.default_rng(0), []
    for row in range(count // GROUP):
        prompt = rng.integers(0, 32000, 128, np.int32)
        for i in range(GROUP):
            ids, log_probs = (
                rng.integers(0, 32000, tokens, np.int32),
                -rng.random(tokens, np.float32),
            )
            arrays = prompt, ids, log_probs, np.ones(tokens, bool), np.zeros(tokens, np.int32)
            text = f"{row}.{i} " + "so it is 27 " * (tokens // 3)
            found.append(Sample((0, row), i, *arrays, 0, 1.0, "stop", text))
    return found


class Other:
    """The other end: a replica with finished samples, and a rank."""

    def __init__(self, count: int, tokens: int) -> None:
        self.samples = made(count, tokens)

    def all(self) -> tuple[list[Sample], float]:
        """The samples of all prompts."""
        return SAMPLES(self.samples), 0.0

    def one(self, row: int) -> tuple[list[Sample], float]:
        """The samples of one prompt."""
        return SAMPLES(self.samples[row * GROUP : (row + 1) * GROUP]), 0.0

    def take(self, reference: list[Any]) -> float:
        """CPU seconds to have the batch."""
        import ray

        begin = time.process_time()
        assert len(ray.get(reference[0]).samples) == len(self.samples)
        return time.process_time() - begin

    def log_prob(self) -> dict[int, np.ndarray]:
        """Of all samples."""
        return SHARES(enumerate(s.log_probs for s in self.samples))


def size_of(what: Any) -> dict[str, float]:
    """As pickled: bytes, and how many arrays that Ray treats one by one."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(what, protocol=5, buffer_callback=arrays.append)
    return {"bytes": len(data) + sum(a.raw().nbytes for a in arrays), "arrays": len(arrays)}


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[dict[str, float], Any]:
    """Milliseconds until it is done, on the clock and of the driver's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = await work()
    return {
        "ms": 1e3 * (time.perf_counter() - wall),
        "cpu_ms": 1e3 * (time.process_time() - cpu),
    }, found


async def measure(count: int, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Way -> medians; the first repeat warms up."""
    import ray

    other: Any = ray.remote(Other).remote(count, tokens)
    rounds: list[dict[str, dict[str, float]]] = []

    async def apart() -> list[Sample]:
        parts = await asyncio.gather(*(other.one.remote(row) for row in range(count // GROUP)))
        return [s for part, _ in parts for s in part]

    async def put() -> Any:
        return groups.put_batch(batch)

    for _ in range(repeats + 1):
        found: dict[str, dict[str, float]] = {}
        found["samples, one answer"], (whole, _) = await timed(lambda: other.all.remote())
        found["samples, one answer per prompt"], _ = await timed(apart)
        batch = Batch(1, whole, (0, 0), advantages=[np.ones(tokens, np.float32) for _ in whole])
        found["batch to the object store"], reference = await timed(put)
        found["batch, in each rank"] = {"cpu_ms": 1e3 * await other.take.remote([reference])}
        found["log-probs from the ranks"], _ = await timed(lambda: other.log_prob.remote())
        rounds.append(found)
    ways = {
        way: {k: statistics.median(r[way][k] for r in rounds[1:]) for k in figures}
        for way, figures in rounds[0].items()
    }
    ways["samples, one answer"] |= size_of(SAMPLES(whole))
    ways["batch to the object store"] |= size_of(
        ray.get(reference) if SAMPLES is list else unpacked(batch)
    )
    ways["log-probs from the ranks"] |= size_of(SHARES(enumerate(s.log_probs for s in whole)))
    return ways


def unpacked(batch: Batch) -> Any:
    """What `groups.put_batch` gives to Ray."""
    batch.stored = NOT_STORED
    import ray

    real, ray.put = ray.put, lambda what: what
    try:
        return groups.put_batch(batch)
    finally:
        ray.put = real


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    arms = result["arms"]
    heads = [f"{who}: {what}" for who in arms for what in ("CPU ms", "ms", "MB", "arrays")]
    lines = ["| of a step | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for way in next(iter(arms.values())):
        cells = [way]
        for arm in arms.values():
            f = arm[way]
            cells += [f"{f['cpu_ms']:.0f}", f"{f['ms']:.0f}" if "ms" in f else ""]
            cells += [f"{f['bytes'] / 1e6:.1f}", f"{f['arrays']}"] if "bytes" in f else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{result['samples']} samples of {result['tokens']} tokens.", ""])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        return print(json.dumps(asyncio.run(measure(args.samples, args.tokens, args.repeats))))
    if not args.out or args.samples < GROUP or args.samples % GROUP:
        parser.error(f"--out is needed, and --samples in multiples of {GROUP}")
    arms = {}
    for who, checkout in (
        ({"before": args.against} if args.against else {}) | {"now": ROOT}
    ).items():
        env = os.environ | {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}
        given = [f"--{name}={getattr(args, name)}" for name in ("samples", "tokens", "repeats")]
        command = [sys.executable, __file__, "--alone", *given]
        done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{who}: {done.stderr[-2000:]}")
        arms[who] = json.loads(done.stdout.splitlines()[-1])
    result = {"arms": arms, "samples": args.samples, "tokens": args.tokens, "repeats": args.repeats}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "result.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
