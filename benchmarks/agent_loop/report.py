"""What `benchmarks.agent_loop` reports."""

from __future__ import annotations

from typing import Any

from benchmarks.agent_loop.vllm_workloads import AGENT_LOOP, BARE_VLLM, ENDPOINT
from benchmarks.common.report import markdown_table, spread, with_range


def _stand_in_lines(result: dict[str, Any]) -> list[str]:
    rows = []
    for name in ("instant_rewards", "slow_rewards"):
        arm = result[name]
        row = [
            name,
            f"{arm['generated_s']:.2f}",
            f"{arm['whole_s']:.2f}",
            f"{arm['engine_idle_share']:.1%}",
            f"{arm['cpu_ms_per_turn']:.2f}",
            f"{arm['cpu_ms_per_trajectory']:.2f}",
        ]
        rows.append(row)
    headings = [
        "rewards",
        "generated, s",
        "all scored, s",
        "engine idle",
        "CPU ms/turn",
        "CPU ms/trajectory",
    ]
    return [
        *markdown_table(headings, rows),
        "",
        f"{result['conversations']} conversations, {result['turns']} turns, a stand-in for the "
        f"engine with {result['slots']} slots. Without the agent loop it takes "
        f"{result['bare_s']:.2f} s, so the agent loop reaches {result['throughput_ratio']:.3f} of "
        f"its throughput. Slow rewards: {result['reward_s']} s.",
    ]


def _vllm_lines(workloads: dict[str, dict[str, list[float]]]) -> list[str]:
    rows = []
    for name, arms in workloads.items():
        for arm, seconds in arms.items():
            ratios = [bare / own for bare, own in zip(arms[BARE_VLLM], seconds, strict=True)]
            cells = [with_range(spread(values), "{:.3f}") for values in (seconds, ratios)]
            rows.append([name, arm, *cells])
    headings = ["with vLLM", "arm", "seconds until the last token", "throughput"]
    return [
        "Median (range); the throughput is relative to that of the bare engine in the same repeat.",
        "",
        *markdown_table(headings, rows),
        *_endpoint_line(workloads),
    ]


def _endpoint_line(workloads: dict[str, dict[str, list[float]]]) -> list[str]:
    """The endpoint against the loop that needs none."""
    for arms in workloads.values():
        if ENDPOINT in arms:
            pairs = zip(arms[AGENT_LOOP], arms[ENDPOINT], strict=True)
            ratios = [built_in / endpoint for built_in, endpoint in pairs]
            share = with_range(spread(ratios), "{:.3f}")
            return ["", f"Through the endpoint: {share} of the agent loop's throughput."]
    return []


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [*_stand_in_lines(result), "", *_vllm_lines(result["vllm"])]
    return "\n".join(lines) + "\n"
