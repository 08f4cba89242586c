"""Ways to bring a trainer's weights into vLLM, in one run and alternating, against a raw broadcast
of the same bytes.

    python -m benchmarks.weight_sync --out DIR [--model tiny|0.5b|7b|32b] [--ranks N] [--replicas N]
        [--tp N] [--arms raw per-tensor whole sharded delta shared file vllm] [--repeats N]
        [--unpacked]
    python -m benchmarks.weight_sync --exposed --out DIR [--repeats N] [--steps N]
        [--settings "training longer" ...]

Real Ray, FSDP2 and vLLM. Every arm uses the same processes (benchmarks/weight_sync/arms.py says
what each does). The canary checks each update, and an arm's first update starts from weights that
fail it. Writes result.json, result.md and weight_sync.png into DIR. `--exposed` measures what a
sync adds to the steps of a run (benchmarks/weight_sync/exposed.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from benchmarks.common.command_line import Parser
from benchmarks.common.report import write_results
from benchmarks.weight_sync import exposed
from benchmarks.weight_sync.layout import ARM_NAMES, SHAPES, Layout, make_config
from benchmarks.weight_sync.report import plot, table


def heading(args: argparse.Namespace, total_bytes: int) -> str:
    """What was measured, in words."""
    order = "one arm after the other" if args.apart else "the arms alternating"
    return (
        f"{SHAPES[args.model].description}, bf16, {total_bytes / 1e6:.1f} MB; "
        f"{args.ranks} trainer rank(s), {args.replicas} replica(s) of TP={args.tp}, buckets of "
        f"{args.bucket_mb} MiB, {args.changed:.1%} of the elements changed between repeats; "
        f"{order}; {len(os.sched_getaffinity(0))} cores, {args.device}, "
        "huge pages in all processes" + (", unpacked parameters." if args.unpacked else ".")
    )


def _add_layout_flags(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        choices=tuple(SHAPES),
        default="tiny",
        help="whose shape; 7b and 32b are cut down",
    )
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks")
    parser.add_argument("--replicas", type=int, default=1, help="vLLM engines")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each engine")
    parser.add_argument(
        "--bucket-mb", type=int, default=64, help="weight_sync.bucket_mb, and the raw buffers' size"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--unpacked",
        action="store_true",
        help="vLLM does not pack its parameters for CPU kernels, so that workers receive what they "
        "keep, as on GPUs",
    )


def _add_exposed_flags(parser: Parser) -> None:
    parser.add_argument(
        "--exposed", action="store_true", help="what a sync adds to the steps of a run"
    )
    settings = list(exposed.SETTINGS)
    parser.add_argument(
        "--settings", nargs="+", choices=settings, default=settings, help="of --exposed"
    )
    syncs = [exposed.PLAIN, exposed.OVERLAPPED]
    parser.add_argument(
        "--against", nargs="+", choices=syncs, default=syncs, help="kinds of sync of --exposed"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=exposed.STEPS,
        help=f"of a run of --exposed, {exposed.FEWEST_STEPS} or more",
    )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    _add_layout_flags(parser)
    parser.add_argument("--arms", nargs="+", choices=ARM_NAMES, default=list(ARM_NAMES))
    parser.add_argument(
        "--repeats", type=int, default=9, help="measured updates of each arm, after one"
    )
    parser.add_argument(
        "--changed", type=float, default=0.02, help="share of elements that change between repeats"
    )
    parser.add_argument(
        "--apart",
        action=argparse.BooleanOptionalAction,
        help="one arm after the other, each alternating with the raw broadcast alone, so that "
        "one at a time has buffers; default: for all models but tiny",
    )
    _add_exposed_flags(parser)
    args = parser.parse_args(argv)
    if args.apart is None:
        args.apart = args.model != "tiny"
    if not 0 < args.changed <= 0.5 or args.repeats < 1:
        parser.error(
            f"--changed {args.changed} --repeats {args.repeats}: above 0 up to 0.5, and at least 1"
        )
    if args.steps < exposed.FEWEST_STEPS:
        parser.error(
            f"--steps {args.steps}: at least {exposed.FEWEST_STEPS}, since the first "
            f"{exposed.WARMUP} and the last are dropped"
        )
    return args


def measure_arms(args: argparse.Namespace) -> dict:
    """Build the model, start the processes and measure. Returns result.json."""
    import ray  # this and the others: slow to import

    from benchmarks.weight_sync.measure import Settings, measure
    from one_step_off.cluster.ray_cluster import start_ray

    print(
        "building the model, starting trainer and engines, measuring: "
        "a minute or two for tiny, ten for 0.5b",
        flush=True,
    )
    layout = Layout(args.model, args.ranks, args.replicas, args.tp, args.bucket_mb, args.device)
    settings = Settings(args.arms, args.repeats, args.changed, args.apart, args.unpacked)
    with tempfile.TemporaryDirectory() as folder:
        cfg = make_config(layout, folder + "/model")
        cfg.trainer.output_dir = folder
        start_ray(cfg)
        try:
            found = asyncio.run(measure(cfg, settings))
        finally:
            ray.shutdown()
    flags = vars(args) | {"out": str(args.out)}
    cores = len(os.sched_getaffinity(0))
    what = heading(args, found["bytes"])
    return {"what": what, "arguments": flags, "cores": cores} | found


def main(argv: list[str] | None = None) -> None:
    """Measure and write the results."""
    args = arguments(argv)
    import transformers  # slow to import

    args.out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    if args.exposed:
        exposed.measure(args.out, args.repeats, args.steps, args.settings, args.against)
        return
    result = measure_arms(args)
    markdown = table(result)
    write_results(args.out, result, markdown)
    plot(result, args.out / "weight_sync.png")
    print(markdown)


if __name__ == "__main__":
    main()
