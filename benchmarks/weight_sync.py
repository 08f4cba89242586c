"""How long a weight sync takes, against a raw broadcast of the same bytes, in one run and in turns.

    python -m benchmarks.weight_sync --out DIR [--model tiny|0.5b] [--ranks N] [--replicas N] [--repeats N]

Real Ray, FSDP2 and vLLM. The raw broadcast goes over buffers whose pages are touched already, between two processes
on the same cores as trainer and engine. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from one_step_off import launch, tiny_qwen
from one_step_off.config import Config
from one_step_off.distributed_util import make_group
from one_step_off.placement import pin_process

# Qwen2.5-0.5B-Instruct's config.json
SHAPE_05B = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
}


class RawPeer:
    """One end of a bare broadcast."""

    def __init__(self, rank: int, cores: tuple[int, ...]) -> None:
        pin_process(cores)
        torch.set_num_threads(1)
        self.rank = rank

    def listen(self) -> int:
        """Open the store (rank 0)."""
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.store.port

    def connect(self, port: int, size: int, sizes: list[int]) -> None:
        """Join the group and touch the buffers."""
        if self.rank:
            self.store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        self.group = make_group(self.store, "raw", self.rank, size, torch.device("cpu"), "127.0.0.1", 60)
        self.sizes, self.buffer = sizes, torch.ones(max(sizes), dtype=torch.uint8)

    def broadcast(self) -> float:
        """Seconds for all buckets, one after the other."""
        begin = time.perf_counter()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for size in self.sizes:
            self.group.broadcast([self.buffer[:size]], options).wait()
        return time.perf_counter() - begin


def make_config(args: argparse.Namespace, folder: str) -> Config:
    """A config whose trainer and engine hold the model to be sent."""
    cfg = Config()
    overrides = SHAPE_05B if args.model == "0.5b" else {}
    cfg.model.path = tiny_qwen.build_random("qwen2", folder, dtype="bfloat16", **overrides)
    cfg.model.dtype = "bfloat16"
    cfg.data.train_files = "generator:word_problems"
    cfg.data.max_prompt_length, cfg.data.max_response_length = 128, 32
    cfg.placement.device = "cpu"
    cfg.placement.pools = {"rollout": [args.replicas], "actor": [args.ranks]}
    cfg.rollout.kv_cache_mb = 64
    cfg.weight_sync.bucket_mb = args.bucket_mb
    cfg.trainer.total_steps = 1
    return cfg


async def measure(cfg: Config, repeats: int) -> dict[str, Any]:
    """Alternate syncs and raw broadcasts; the first of each is a warm-up."""
    import ray

    prepared = launch.prepare(cfg, print)
    roles = launch.spawn_roles(prepared).roles
    await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
    await roles.sync.connect()
    cores = sorted(os.sched_getaffinity(0))
    n = len(roles.rollout.replicas)
    # Rank 0 where the first trainer rank is pinned, the others where the replicas are.
    peers = [
        ray.remote(RawPeer).options(num_cpus=0).remote(i, (cores[-1],) if i == 0 else (cores[0],)) for i in range(n + 1)
    ]
    first = await roles.sync((0, 0))
    bucket, total = cfg.weight_sync.bucket_mb << 20, int(first["sync/bytes"])
    sizes = [bucket] * (total // bucket) + ([total % bucket] if total % bucket else [])
    port = await peers[0].listen.remote()
    await asyncio.gather(*(p.connect.remote(port, n + 1, sizes) for p in peers))
    syncs, raws = [], []
    for i in range(repeats + 1):
        sync = await roles.sync((0, 0))
        raw = max(await asyncio.gather(*(p.broadcast.remote() for p in peers)))
        if i:
            syncs.append(sync)
            raws.append(raw)
    await roles.rollout.stop()
    middle = {k: statistics.median(s[k] for s in syncs) for k in syncs[0]}
    raw = statistics.median(raws)
    return {
        "sync_s": {"median": middle["sync/transfer_s"], "all": [s["sync/transfer_s"] for s in syncs]},
        "raw_broadcast_s": {"median": raw, "all": raws},
        "ratio_to_raw": middle["sync/transfer_s"] / raw,
        "bytes": total,
        "sync_gb_per_s": total / middle["sync/transfer_s"] / 1e9,
        "raw_gb_per_s": total / raw / 1e9,
        "split_s": {k: middle[f"sync/{k}_s"] for k in ("pack", "pause", "prepare", "wire", "load", "verify", "finish")},
        "canary_s": middle["time/canary_s"],
        "canary_logprob_diff_max": middle["canary/logprob_diff_max"],
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    rows = [
        ("sync, end to end", result["sync_s"]["median"], result["sync_gb_per_s"]),
        ("raw broadcast, touched buffers", result["raw_broadcast_s"]["median"], result["raw_gb_per_s"]),
    ]
    lines = [f"{result['bytes'] / 1e6:.1f} MB, medians of {len(result['sync_s']['all'])}", ""]
    lines += ["| | seconds | GB/s |", "| --- | --- | --- |"]
    lines += [f"| {name} | {seconds:.4f} | {speed:.2f} |" for name, seconds, speed in rows]
    lines += ["", "| phase | seconds (slowest process) |", "| --- | --- |"]
    lines += [f"| {name} | {seconds:.4f} |" for name, seconds in result["split_s"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse, measure, write."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for result.json and result.md")
    parser.add_argument("--model", choices=("tiny", "0.5b"), default="tiny", help="0.5b: the shape of Qwen2.5-0.5B")
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks")
    parser.add_argument("--replicas", type=int, default=1, help="vLLM engines")
    parser.add_argument("--repeats", type=int, default=7, help="measured syncs and raw broadcasts, after one of each")
    parser.add_argument("--bucket-mb", type=int, default=64, help="weight_sync.bucket_mb, and the raw buffers' size")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    print("making the model, starting trainer and engines, measuring: up to a minute for tiny, three for 0.5b")
    with tempfile.TemporaryDirectory() as folder:
        cfg = make_config(args, folder + "/model")
        cfg.trainer.output_dir = folder
        launch.start_ray(cfg)
        try:
            result = {"arguments": vars(args)} | asyncio.run(measure(cfg, args.repeats))
        finally:
            ray.shutdown()
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "result.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
