"""What computing the common first tokens of a group's samples once gains.

    python -m benchmarks.shared_prefix --out DIR [--model tiny:qwen2] [--layers 30] [--repeats 5]
        [--prompts 1] [--n 8] [--shapes 512x128,256x64,128x256,256x256x64] [--segments 3]

One rank of the FSDP2 back end in this process, on a GPU where there is one, else on one core of a
CPU, by whose own seconds it measures: other programs change them less than those of the clock. A
shape is the tokens of the prompt x those of each response, all random; or of the prompt x
those that the segments of an episode have in common after it x those of each segment. The arms
alternate: every sample alone; for episodes, shared on one level, the prompt or what is more, each
episode's; shared, as a tree; whatever the cost rule says. `--model 135m` has the shape of
SmolLM2-135M with random weights. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command_line import Parser
from benchmarks.common.models import SMOLLM2_135M
from benchmarks.common.report import markdown_table, write_results
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample

TOKEN_IDS = 300  # token ids are drawn below this, which every model's vocabulary exceeds
LOG_PROB = -5.9  # about that of one token of 300
LEARNING_RATE = 1e-6


def model_folder(model: str, layers: int, out: Path) -> str:
    """The folder of a model of `tiny_qwen`, of "135m" with so many layers, or `model` itself."""
    from one_step_off.models import tiny_qwen  # slow to import

    if model == "135m":
        shape = SMOLLM2_135M | {"num_hidden_layers": layers, "tie_word_embeddings": True}
        return tiny_qwen.build("llama", str(out / "model"), **shape)
    return tiny_qwen.ensure(model) if model.startswith("tiny:") else model


def grouped_batch(prompts: int, n: int, shape: list[int], segments: int) -> Batch:
    """A batch in which the samples of a prompt have its tokens in common, and the segments of an
    episode those of its first turns, which the first of them trains."""
    prompt_tokens, *episode, tokens = shape
    episode_tokens = sum(episode)
    rng = np.random.default_rng(0)

    def random_tokens(count: int) -> np.ndarray:
        return rng.integers(0, TOKEN_IDS, count).astype(np.int32)

    samples = []
    for row in range(prompts):
        prompt_ids = random_tokens(prompt_tokens)
        for index in range(n):
            first_turns = random_tokens(episode_tokens)
            for segment in range(segments if episode else 1):
                total = episode_tokens + tokens
                sample = Sample(
                    (0, row),
                    index,
                    prompt_ids,
                    np.concatenate([first_turns, random_tokens(tokens)]),
                    np.full(total, LOG_PROB, np.float32),
                    np.arange(total) >= (episode_tokens if segment else 0),
                    np.zeros(total, np.int32),
                )
                samples.append(sample)
    batch = Batch(0, samples, expected_stamp=(0, 0))
    batch.advantages = [rng.normal(size=len(s.loss_mask)).astype(np.float32) for s in samples]
    return batch


def on_one_level(prefixes: np.ndarray, prompt_tokens: int) -> np.ndarray:
    """The prompt alone, or what is common in each episode alone: what is more."""
    common = prefixes[:, 1]
    of_prompt = np.minimum(common, prompt_tokens)
    of_episodes = np.where(common > prompt_tokens, common, 0)
    best = max(of_prompt, of_episodes, key=np.sum)
    return np.column_stack([prefixes[:, 0], best])


def measure(worker: Any, batch: Batch, repeats: int, is_tree: bool) -> dict[str, Any]:
    """Median seconds of an update and of log-probs in all arms, and what the rule decides.
    `is_tree`: sharing on one level is an arm, too."""
    from one_step_off.algorithms.shared_prefixes import prefixes_of

    rule = worker.batch_share.sharing
    rows = worker._rows(batch, list(range(len(batch.samples))))
    always = replace(rule, least_gain=-1.0, least_saving=-np.inf)
    prefixes = prefixes_of(batch.samples)
    arms = [("plain", None, prefixes), ("shared", always, prefixes)]
    if is_tree:
        one_level = on_one_level(prefixes, len(batch.samples[0].prompt_ids))
        arms.append(("one_level", always, one_level))
    clock = time.perf_counter if worker.device.type == "cuda" else time.process_time
    seconds: dict[str, dict[str, list[float]]] = {}
    for repeat in range(repeats + 1):
        for arm, rule_of_arm, prefixes_of_arm in arms if repeat % 2 else arms[::-1]:
            worker.batch_share.sharing = rule_of_arm
            batch.prefixes = prefixes_of_arm
            for call in ("update", "log_prob"):
                begin = clock()
                getattr(worker, call)(batch)
                spent = clock() - begin
                if repeat:  # the first warms up
                    seconds.setdefault(call, {}).setdefault(arm, []).append(spent)
    worker.batch_share.sharing = rule
    result: dict[str, Any] = {"rule": "shared" if rows[:, 1].any() else "plain"}
    lengths = np.array([sample.length for sample in batch.samples])
    plain = rule.cost(lengths).sum()
    shared = rule.cost(lengths, prefixes[:, 1]).sum()
    result["predicted"] = float(shared / plain)
    result["predicted_saving_flops"] = float(plain - shared)
    for call, arms_of_call in seconds.items():
        for arm, values in arms_of_call.items():
            result[f"{call}_{arm}_s"] = statistics.median(values)
        result[f"{call}_ratio"] = result[f"{call}_shared_s"] / result[f"{call}_plain_s"]
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """The result in Markdown."""
    header = ["shape"]
    for call in ("update", "log-probs"):
        header += [f"{call}, plain, s", "one level, s", "shared, s", "ratio"]
    cells = []
    for row in rows:
        figures = []
        for call in ("update", "log_prob"):
            for name in ("plain_s", "one_level_s", "shared_s", "ratio"):
                figure = row.get(f"{call}_{name}")
                figures.append("" if figure is None else f"{figure:.3g}")
        cells.append([row["shape"], *figures, f"{row['predicted']:.2f}", row["rule"]])
    return "\n".join(markdown_table([*header, "predicted", "rule"], cells)) + "\n"


def main() -> None:
    """Measure and write the result."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--model", default="tiny:qwen2")
    parser.add_argument("--layers", type=int, default=30, help="of the model 135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--n", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--shapes", default="512x128,256x64,128x256,256x256x64")
    parser.add_argument("--segments", type=int, default=3, help="of each episode")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    args = parser.parse_args()
    import torch  # slow to import

    from one_step_off.training.fsdp.fsdp_workers import PolicyWorker

    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    cfg = Config()
    cfg.model.path = model_folder(args.model, args.layers, args.out)
    cfg.model.dtype = "bfloat16" if device == "cuda" else "float32"
    cfg.actor.ppo_mini_batch_size = args.prompts
    cfg.actor.micro_batch_tokens = args.micro_batch_tokens
    cfg.actor.lr = LEARNING_RATE
    worker = PolicyWorker(cfg, "actor", 0, 1, device, total_steps=1000)
    worker.setup(*worker.free_address("127.0.0.1"))
    rows = []
    for shape in args.shapes.split(","):
        sizes = [int(size) for size in shape.split("x")]
        batch = grouped_batch(args.prompts, args.n, sizes, args.segments)
        row = {"shape": shape} | measure(worker, batch, args.repeats, len(sizes) > 2)
        rows.append(row)
        print(row, flush=True)
    settings = vars(args) | {"device": device, "out": str(args.out)}
    text = table(rows)
    write_results(args.out, {"settings": settings, "rows": rows}, text)
    print(text)


if __name__ == "__main__":
    main()
