"""What the agent loop itself costs: CPU time per turn, idle share with slow rewards, throughput
against the bare engine.

    python -m benchmarks.agent_loop --out DIR [--conversations 500] [--reward-s 0.5] [--repeats 7]

First with a stand-in for the engine that has a fixed number of slots and a fixed time per token, so
that nothing but the loop differs. Then with vLLM: conversations of tiny:tools with its calculator,
and single turns of a more usual length, these through the endpoint, too. For comparison the same
requests go to the engine alone, each after the one that it builds on. The arms alternate. Writes
result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from benchmarks.common.command_line import Parser
from benchmarks.common.report import write_results
from one_step_off.runtime.process_env import COMMON_ENV, ENGINE_ENV


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--reward-s", type=float, default=0.5, help="seconds of a slow reward")
    parser.add_argument("--repeats", type=int, default=7, help="of each arm with vLLM")
    return parser.parse_args()


def main() -> None:
    """Measure and write the results."""
    args = arguments()
    from benchmarks.agent_loop import stand_in_engine, vllm_workloads  # slow to import
    from benchmarks.agent_loop.report import table

    args.out.mkdir(parents=True, exist_ok=True)
    # The environment of replicas: the tokenizers library, for example, depends on it.
    os.environ.update(COMMON_ENV | ENGINE_ENV["cpu"])
    result = stand_in_engine.measure(args.conversations, args.reward_s)
    result["vllm"] = asyncio.run(vllm_workloads.measure(args.repeats, args.reward_s))
    markdown = table(result)
    write_results(args.out, result, markdown)
    print(markdown)


if __name__ == "__main__":
    main()
