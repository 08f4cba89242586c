"""What a step costs the driver, apart from the work of replicas and trainers.

    python -m benchmarks.overhead --out DIR [--replicas 1 8 64 512] [--samples 64 1024 8192 16384]
        [--tokens 512] [--against CHECKOUT] [--repeats 1] [--profile] [--no-loggers] [--full]

Pipeline, groups, weight sync, tracker and loggers are the real ones. Replicas and ranks are
stand-ins in this process that answer after a fixed time with samples made beforehand. Each cell of
the table is a process of its own. It measures the CPU seconds of the driver per step, less what the
stand-ins take when they get the same calls alone; and how much longer a step, and its generation,
take than the fixed times. `--against`: another checkout, measured alternately with this one. What
Ray itself costs is in `benchmarks.overhead_ray`. Writes result.json, result.md and overhead.png
into DIR.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.paths import ROOT
from benchmarks.common.processes import run_in_checkout
from benchmarks.common.report import write_results
from benchmarks.overhead.cell import SAMPLES_PER_PROMPT, WARM_UP_STEPS, Cell
from benchmarks.overhead.report import cell_name, medians, plot, table


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[64, 1024, 8192, 16384], help="of a step"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of a sample")
    parser.add_argument("--ranks", type=int, default=8, help="trainer ranks of each role")
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--routing", choices=["static", "least_loaded"], default="least_loaded")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell")
    parser.add_argument("--against", type=Path, help="another checkout to measure as well")
    parser.add_argument("--no-loggers", action="store_true")
    parser.add_argument("--full", action="store_true", help="with critic, reference model and GAE")
    parser.add_argument(
        "--profile", action="store_true", help="print Python's profile of each cell"
    )
    # One cell as JSON: how the benchmark calls itself in a process per cell.
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        return args
    fewest_steps = WARM_UP_STEPS + 2
    bad_samples = any(
        count < SAMPLES_PER_PROMPT or count % SAMPLES_PER_PROMPT for count in args.samples
    )
    if not args.out or args.steps < fewest_steps or bad_samples:
        parser.error(
            f"--out is needed, --samples in multiples of {SAMPLES_PER_PROMPT}, "
            f"and --steps of {fewest_steps} or more"
        )
    return args


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """The cells of the table."""
    return [
        Cell(
            replicas,
            samples,
            tokens=args.tokens,
            ranks=args.ranks,
            steps=args.steps,
            routing=args.routing,
            loggers=not args.no_loggers,
            full=args.full,
            profile=args.profile,
        )
        for replicas in args.replicas
        for samples in args.samples
    ]


def measure_in_a_process(cell: Cell, checkout: Path) -> dict[str, Any]:
    """Measure a cell with the product of that checkout.

    Raises:
        RuntimeError: the process ended with an error.
    """
    output = run_in_checkout(
        "benchmarks.overhead", ["--cell", json.dumps(asdict(cell))], checkout.resolve()
    )
    return json.loads(output)


def measure_cells(
    cells: list[Cell], checkouts: dict[str, Path], repeats: int
) -> dict[str, dict[str, Any]]:
    """Measure all cells with all checkouts, alternately. Returns arm -> cell -> figures."""
    arms: dict[str, dict[str, Any]] = {arm: {} for arm in checkouts}
    for cell in cells:
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in checkouts}
        for _ in range(repeats):
            for arm, checkout in checkouts.items():
                run = measure_in_a_process(cell, checkout)
                runs[arm].append(run)
                if cell.profile:
                    size = f"{cell.replicas} replicas, {cell.samples} samples"
                    print(f"{arm}, {size}", run["profile"])
        for arm, arm_runs in runs.items():
            arms[arm][cell_name(cell)] = medians(arm_runs)
    return arms


def main(argv: list[str] | None = None) -> None:
    """Measure the cells and write the results."""
    args = arguments(argv)
    if args.cell:
        # Imported here: the process that only starts the others needs none of it.
        from benchmarks.overhead.measure import measure

        cell = Cell(**json.loads(args.cell))
        print(json.dumps(measure(cell)))
        return
    checkouts = {}
    if args.against:
        checkouts["before"] = args.against
    checkouts["now"] = ROOT
    cells = cells_of(args)
    arms = measure_cells(cells, checkouts, args.repeats)
    result = {"arms": arms, "repeats": args.repeats, "cell": asdict(cells[-1])}
    args.out.mkdir(parents=True, exist_ok=True)
    markdown = table(result)
    write_results(args.out, result, markdown)
    plot(result, args.out / "overhead.png")
    print(markdown)


if __name__ == "__main__":
    main()
