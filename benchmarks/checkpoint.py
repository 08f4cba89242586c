"""What a checkpoint costs: the wait of the trainer, the writing beside it, the check before a resume, the loading.

    python -m benchmarks.checkpoint --out DIR [--model tiny:qwen2] [--layers 24] [--repeats 3]

One rank of the FSDP back end on a CPU, in this process. `--model 0.5b` has the shape of Qwen2.5-0.5B, with random
weights: 5.9 GB in a checkpoint, and 14 GB of memory; with `--layers 6` 2.7 and 7 GB. Writes result.json into DIR.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from one_step_off.checkpoint import checkpoints as checkpoint
from one_step_off.config.schema import Config
from one_step_off.models import tiny_qwen
from one_step_off.training.fsdp_workers import PolicyWorker

HALF_B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


def started(model: str, layers: int, out: Path) -> tuple[Config, PolicyWorker]:
    """A worker whose optimiser has moments."""
    cfg = Config()
    if model == "0.5b":
        cfg.model.path = tiny_qwen.build(
            "qwen2", str(out / "model"), num_hidden_layers=layers, **HALF_B
        )
    else:
        cfg.model.path = tiny_qwen.ensure(model)
    cfg.model.dtype = "float32"
    cfg.trainer.output_dir = str(out / "run")
    worker = PolicyWorker(cfg, "actor", 0, 1, "cpu", total_steps=10)
    worker.setup("127.0.0.1", worker.free_address("127.0.0.1")[1])
    worker._state()  # makes the moments
    return cfg, worker


async def saved(checkpointer: checkpoint.Checkpointer, step: int) -> dict[str, float]:
    """Take a checkpoint: seconds that the trainer waits, seconds in all, bytes."""
    begin = time.perf_counter()
    written = await checkpointer.save(step, None, {"stream": {}})
    stall = time.perf_counter() - begin
    _, size = await written
    return {"stall_s": stall, "write_s": time.perf_counter() - begin, "bytes": float(size)}


def measured(cfg: Config, worker: PolicyWorker, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` checkpoints; the first, in which everything is imported and allocated, beside them."""

    async def copied(folder: str) -> asyncio.Future:
        worker.save_state(folder)
        return asyncio.ensure_future(asyncio.to_thread(worker.saved))

    cfg.trainer.keep_checkpoints = 1
    checkpointer = checkpoint.Checkpointer(cfg, copied)
    found = [asyncio.run(saved(checkpointer, step)) for step in range(1, repeats + 2)]
    begin = time.perf_counter()
    path = checkpoint.find(cfg)
    verified = time.perf_counter()
    worker.load_state(str(path))
    loaded = time.perf_counter()
    medians = {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}
    return medians | {
        "first_stall_s": found[0]["stall_s"],
        "verify_s": verified - begin,
        "load_s": loaded - verified,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny:qwen2")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"model": args.model, "layers": args.layers} | measured(
        *started(args.model, args.layers, args.out), args.repeats
    )
    shutil.rmtree(args.out / "run")
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
