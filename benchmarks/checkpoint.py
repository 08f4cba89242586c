"""What a checkpoint costs: how long the trainer waits, the writing in the background, the check
before a resume, and the loading.

    python -m benchmarks.checkpoint --out DIR [--backend fsdp] [--model tiny:qwen2] [--layers 24]
        [--repeats 3]

One rank of a training back end on a CPU, in this process. `--model 0.5b` has the shape of
Qwen2.5-0.5B with random weights: 5.9 GB in a checkpoint of FSDP2, and 14 GB of memory; with
`--layers 6` 2.7 and 7 GB. Megatron writes a third more. Writes result.json into DIR.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.common.command_line import Parser
from benchmarks.common.models import QWEN25_05B
from one_step_off.config.schema import Config

if TYPE_CHECKING:
    from one_step_off import checkpoint
    from one_step_off.training.trained_worker import TrainedWorker
    from one_step_off.training.written_files import FileFacts

BACKENDS = ("fsdp", "megatron")


def worker_class(backend: str) -> type[TrainedWorker]:
    """The policy of a back end. Megatron-core is an extra, and imported only if asked for."""
    if backend == "megatron":
        from one_step_off.training.megatron.megatron_workers import MegatronPolicyWorker

        return MegatronPolicyWorker
    from one_step_off.training.fsdp.fsdp_workers import PolicyWorker

    return PolicyWorker


def start_worker(backend: str, model: str, layers: int, out: Path) -> tuple[Config, TrainedWorker]:
    """A trainer rank in this process. Its first checkpoint gives the optimizer its moments.

    Args:
        backend: of `BACKENDS`.
        model: a model of `tiny_qwen`, or "0.5b".
        layers: of the model "0.5b".
        out: folder for the model and the run.
    """
    from one_step_off.models import tiny_qwen  # slow to import

    cfg = Config()
    if model == "0.5b":
        shape = QWEN25_05B | {"num_hidden_layers": layers}
        cfg.model.path = tiny_qwen.build("qwen2", str(out / "model"), **shape)
    else:
        cfg.model.path = tiny_qwen.ensure(model)
    cfg.model.dtype = "float32"
    cfg.trainer.output_dir = str(out / "run")
    cfg.actor.backend = backend
    worker = worker_class(backend)(cfg, "actor", 0, 1, "cpu", total_steps=10)
    _, port = worker.free_address("127.0.0.1")
    worker.setup("127.0.0.1", port)
    return cfg, worker


async def time_save(checkpointer: checkpoint.Checkpointer, step: int) -> dict[str, float]:
    """Take a checkpoint. Returns the seconds that the trainer waits, the seconds in all, the
    checkpoint's bytes, and the bytes of host memory that the copy takes.
    """
    memory = psutil.Process().memory_info
    resident_before = memory().rss
    begin = time.perf_counter()
    writing = await checkpointer.save(step, None, {"stream": {}})
    stall = time.perf_counter() - begin
    copied = memory().rss - resident_before
    _, size = await writing
    return {
        "stall_s": stall,
        "write_s": time.perf_counter() - begin,
        "bytes": float(size),
        "copy_bytes": float(copied),
    }


def measure(cfg: Config, worker: TrainedWorker, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` checkpoints.

    A first checkpoint, in which everything is imported and allocated, is reported apart.
    """
    from one_step_off import checkpoint

    async def save_state(folder: str) -> asyncio.Future:
        worker.save_state(folder)

        async def written() -> list[FileFacts]:
            return [await asyncio.to_thread(worker.saved)]

        return asyncio.ensure_future(written())

    cfg.trainer.keep_checkpoints = 1
    checkpointer = checkpoint.Checkpointer(cfg, save_state)
    first = asyncio.run(time_save(checkpointer, 1))
    saves = [asyncio.run(time_save(checkpointer, step)) for step in range(2, repeats + 2)]
    begin = time.perf_counter()
    path = checkpoint.find(cfg)
    verified = time.perf_counter()
    worker.load_state(str(path))
    loaded = time.perf_counter()
    medians = {name: statistics.median(save[name] for save in saves) for name in first}
    return medians | {
        "first_stall_s": first["stall_s"],
        "verify_s": verified - begin,
        "load_s": loaded - verified,
    }


def main() -> None:
    """Measure and write the result."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--backend", choices=BACKENDS, default="fsdp")
    parser.add_argument("--model", default="tiny:qwen2")
    parser.add_argument("--layers", type=int, default=24, help="of the model 0.5b")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cfg, worker = start_worker(args.backend, args.model, args.layers, args.out)
    figures = measure(cfg, worker, args.repeats)
    shutil.rmtree(args.out / "run")
    arguments = {"backend": args.backend, "model": args.model, "layers": args.layers}
    text = json.dumps(arguments | figures, indent=2)
    (args.out / "result.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
