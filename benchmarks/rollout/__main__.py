"""The rollout against the bare vLLM engine.

    python -m benchmarks.rollout --out DIR [--rows 512] [--requests 600] [--tokens 96] [--repeats 3]
        [--config FILE] [--parts host end-to-end] [section.key=value ...]

"host": microseconds of CPU time per token of each part of the host's work, with made-up tokens in
place of a model: vLLM's scheduler, encoder and client with our requests, and with ours in it; and
what our own layers add. "end-to-end": tokens per second of a replica and of the bare engine, which
get the same requests and alternate; with the tiny model on CPUs, on a GPU with that of the config
keys. Writes result.json, result.md and rollout.png into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.command_line import Parser
from benchmarks.common.machine import machine
from benchmarks.common.paths import config_path
from benchmarks.common.report import write_results
from benchmarks.rollout.report import plot, table
from one_step_off.config.command_line import exit_code
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.runtime.process_env import COMMON_ENV, ENGINE_ENV

if TYPE_CHECKING:
    from benchmarks.rollout import host

PARTS = ("host", "end-to-end")
VLLM = "vLLM's scheduler"
OURS = "ours"
GPU_KEYS = ("placement.device=cuda", "rollout.gpu_memory_utilization=0.4")
"""Two engines share the GPU."""


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=config_path("gsm8k_tiny_cpu.yaml"))
    parser.add_argument("--rows", type=int, default=512, help="sequences at once, of the host part")
    parser.add_argument("--requests", type=int, default=600, help="of the host part")
    parser.add_argument("--tokens", type=int, default=96, help="of its longest response")
    parser.add_argument("--repeats", type=int, default=3, help="of each arm")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    return parser.parse(argv)


def host_arms(cfg: Config) -> dict[str, host.Arm]:
    """vLLM's own scheduler with the requests of a run, and the run's."""
    import numpy as np

    from benchmarks.rollout import host
    from one_step_off.engines.engine import GenerationRequest
    from one_step_off.engines.vllm.engine import generated_tokens, sampling_params
    from one_step_off.engines.vllm.engine_args import engine_args

    request = GenerationRequest(np.zeros(1, np.int32), 1, cfg.rollout.temperature)
    params = sampling_params(cfg, request)
    names = ("temperature", "logprobs", "flat_logprobs", "output_kind", "detokenize")
    plain = {name: getattr(params, name) for name in names} | {"ignore_eos": True}
    own = plain | {"extra_args": params.extra_args}
    scheduler = engine_args(cfg, "cuda")["scheduler_cls"]
    return {
        VLLM: host.Arm(None, plain, lambda answer: answer),
        OURS: host.Arm(scheduler, own, generated_tokens),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure and write the results. Returns the exit code."""
    return exit_code(_main, sys.argv[1:] if argv is None else argv)


def _main(argv: list[str]) -> int:
    args, keys = arguments(argv)
    import torch  # slow to import

    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update(COMMON_ENV | ENGINE_ENV[device])
    own_keys = GPU_KEYS if device == "cuda" else ()
    cfg = load_config([f"config={args.config}", *own_keys, *keys])
    # Only now: their libraries warn when they are imported, and an error stands alone.
    from benchmarks.rollout import end_to_end, host, layers

    result: dict[str, Any] = {"machine": machine(), "device": device, "rows": args.rows}
    if "host" in args.parts:
        load = host.Load.random(args.rows, args.requests, args.tokens)
        result["host"] = host.measure(host_arms(cfg), load, args.repeats)
        result["layers"] = layers.measure(load, args.repeats)
    if "end-to-end" in args.parts:
        measured = end_to_end.measure(cfg, device, args.repeats)
        result["end_to_end"] = asyncio.run(measured)
    markdown = table(result)
    write_results(args.out, result, markdown)
    plot(result, args.out / "rollout.png")
    print(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
