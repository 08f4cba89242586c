"""What each optimizer costs: the memory of its state, and the time of a step.

    python -m benchmarks.optimizers --out DIR [--model tiny:qwen2] [--layers 30] [--repeats 3]
        [--optimizers adamw,adamw_8bit,muon]

One rank of the FSDP2 back end on a CPU, in this process. The gradients are the weights. `--model
135m` has the shape of SmolLM2-135M with random weights and takes about 3 GB; with `--layers 3` one.
`--repeats 0` measures the memory alone. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.models import SMOLLM2_135M
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import OPTIMIZERS

LEARNING_RATE = 1e-6


def model_folder(model: str, layers: int, out: Path) -> str:
    """The folder of a model of `tiny_qwen`, or of "135m" with so many layers."""
    from one_step_off.models import tiny_qwen  # slow to import

    if model == "135m":
        shape = SMOLLM2_135M | {"num_hidden_layers": layers, "tie_word_embeddings": True}
        return tiny_qwen.build("llama", str(out / "model"), **shape)
    return tiny_qwen.ensure(model)


def measure(path: str, optimizer: str, repeats: int) -> dict[str, Any]:
    """Bytes of the state, and the median seconds of a step, after a first one; None: no step."""
    import torch

    from one_step_off.training import optimizers
    from one_step_off.training.fsdp.fsdp_workers import PolicyWorker

    cfg = Config()
    cfg.model.path = path
    cfg.model.dtype = "float32"
    cfg.actor.optimizer = optimizer
    worker = PolicyWorker(cfg, "actor", 0, 1, "cpu", total_steps=10)
    worker.setup(*worker.free_address("127.0.0.1"))
    parameters: Any = list(worker.model.parameters())
    optimizers.create_state(worker.optimizer)
    seconds = []
    for _ in range(repeats + 1 if repeats else 0):
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        begin = time.perf_counter()
        worker._clip_and_step(torch.ones(()), LEARNING_RATE)
        seconds.append(time.perf_counter() - begin)
    state_bytes = optimizers.state_bytes(worker.optimizer)
    count = sum(parameter.numel() for parameter in parameters)
    torch.distributed.destroy_process_group()
    return {
        "optimizer": optimizer,
        "parameters": count,
        "state_bytes": state_bytes,
        "bytes_per_parameter": state_bytes / count,
        "step_s": statistics.median(seconds[1:]) if seconds else None,
    }


def table(model: str, rows: list[dict[str, Any]]) -> str:
    """The result in Markdown."""
    lines = [
        f"{model}, {rows[0]['parameters']:,} parameters, one rank on a CPU",
        "",
        "| optimizer | state, MB | bytes per parameter | step, s |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        step = "-" if row["step_s"] is None else f"{row['step_s']:.3g}"
        lines.append(
            f"| `{row['optimizer']}` | {row['state_bytes'] / 1e6:.4g} | "
            f"{row['bytes_per_parameter']:.3g} | {step} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the result."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--model", default="tiny:qwen2")
    parser.add_argument("--layers", type=int, default=30, help="of the model 135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    args = parser.parse_args()
    import torch  # slow to import

    args.out.mkdir(parents=True, exist_ok=True)
    path = model_folder(args.model, args.layers, args.out)
    rows = [measure(path, name, args.repeats) for name in args.optimizers.split(",")]
    result = {
        "model": args.model,
        "layers": args.layers,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    text = table(args.model, rows)
    (args.out / "result.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
