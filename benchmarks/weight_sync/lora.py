"""LoRA's two ways into vLLM: rows merged by the trainer, as the program has it, or adapters alone
into vLLM's own LoRA.

    python -m benchmarks.lora --out DIR [--model tiny|0.5b] [--repeats 5]

Real Ray, FSDP2 and vLLM in bf16, all linear layers, rank 8. Each way has a trainer rank and an
engine, and both alternate after one update. The second way exists only here. Writes result.json and
result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.batches import random_batch
from benchmarks.common.command_line import Parser
from benchmarks.common.report import markdown_table, write_results
from benchmarks.weight_sync.layout import Layout, make_config
from one_step_off.cluster.ray_cluster import start_ray
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.rollout import vllm_replica
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.vllm_replica import RolloutReplica
from one_step_off.runtime import engines, processes
from one_step_off.runtime.prepare import prepare
from one_step_off.runtime.processes import RunProcesses
from one_step_off.training.fsdp_workers import ActorWorker
from one_step_off.weight_sync.vllm_receiver import SyncWorkerExtension
from one_step_off.weight_sync.weight_piece import WeightPiece

RANK = 8
ALPHA = 32
ADAPTER_ID = 1
PROMPT_TOKENS = 64
TOKEN_IDS = 300


@dataclass(frozen=True)
class Work:
    """What is generated after each sync. `tokens`: of each sample."""

    prompts: int
    samples_per_prompt: int
    tokens: int


WORK = {"tiny": Work(16, 4, 32), "0.5b": Work(4, 4, 16)}


class AdapterActor(ActorWorker):
    """Sends the matrices A and B themselves, by peft's names (on one rank)."""

    def _sent_weights(self) -> list[tuple[WeightPiece, Any]]:
        dtype = self.cfg.model.dtype
        pieces = []
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                sent_name = name.replace(".default", "")
                shape = tuple(parameter.shape)
                pieces.append((WeightPiece(sent_name, dtype, shape, 0, len(parameter)), parameter))
        return pieces


class AdapterExtension(SyncWorkerExtension):
    """In vLLM's worker: puts what arrives into the engine's LoRA manager, from memory."""

    def sync_weights(self, version: int, only_kept: bool = False) -> dict[str, float]:
        """One whole update. `only_kept`: never, since the model has no such tensors."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        tensors: dict[str, Any] = {}

        def keep(bucket: list[tuple[str, Any]]) -> None:
            for name, tensor in bucket:
                tensors[f"base_model.model.{name}"] = tensor.clone()

        report = self.weight_transfer_engine.receiver.receive(keep, version)
        lora_manager = self.model_runner.lora_manager
        settings = PEFTHelper(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
        dtype = lora_manager.lora_config.lora_dtype
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID, tensors, settings, str(lora_manager.device), dtype
        )
        adapters = lora_manager._adapter_manager
        adapters.remove_adapter(ADAPTER_ID)
        adapters.add_adapter(adapter)
        adapters.activate_adapter(ADAPTER_ID)
        return report


class AdapterReplica(RolloutReplica):
    """An engine with vLLM's LoRA, all of whose requests ask for the adapter."""

    async def start(
        self, former: Sequence[tuple[int, float]] = ()
    ) -> tuple[int, list[tuple[int, float]]]:
        """As `RolloutReplica.start`, with vLLM's LoRA on."""
        from vllm.lora.request import LoRARequest

        self.lora = LoRARequest("actor", ADAPTER_ID, "in memory")
        product_args = vllm_replica.engine_args
        lora_args = {
            "enable_lora": True,
            "max_lora_rank": RANK,
            "max_loras": 1,
            "worker_extension_cls": "benchmarks.weight_sync.lora.AdapterExtension",
        }
        vllm_replica.engine_args = lambda *args: product_args(*args) | lora_args
        return await super().start(former)

    async def _request(self, ids: np.ndarray, params: Any) -> Any:
        self.started_requests += 1
        prompt = {"prompt_token_ids": ids.tolist()}
        request_id = str(self.started_requests)
        answers = self.engine.generate(prompt, params, request_id, lora_request=self.lora)
        outputs = [output async for output in answers]
        return outputs[-1]


WAYS = {
    "merged by the trainer": (ActorWorker, RolloutReplica),
    "adapters into vLLM": (AdapterActor, AdapterReplica),
}
"""Way -> the classes of trainer rank and replica."""

SYNC_FIGURES = {
    "seconds": "sync/transfer_s",
    "bytes": "sync/bytes",
    "pack": "sync/gather_s",
    "load": "sync/load_s",
    "canary, max": "canary/logprob_diff_max",
    "canary, mean": "canary/logprob_diff_mean",
}
"""Figure -> its metric of the sync."""

FIGURES = (*SYNC_FIGURES, "tokens/s")


async def start_way(cfg: Config, actor: type, replica: type) -> RunProcesses:
    """Start the processes of a way, sync them and make one update."""
    processes.WORKERS["actor"] = actor
    engines.RolloutReplica = replica
    run = RunProcesses(prepare(cfg, lambda line: None))
    roles = run.roles
    await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
    await roles.sync.connect()
    # An update waits until the weights before it have been sent.
    await roles.sync((0, 0))
    await roles.actor.update(random_batch(prompts=4, samples_per_prompt=2, tokens=32))
    return run


async def measure_once(run: RunProcesses, work: Work, repeat: int) -> dict[str, float]:
    """One sync and the generation after it. Returns the figures."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, TOKEN_IDS, (work.prompts, PROMPT_TOKENS)).astype(np.int32)
    metrics = await run.roles.sync((0, 1))
    prompts = [Prompt((repeat, row), prompt_ids, "", "1") for row, prompt_ids in enumerate(ids)]
    sampling = Sampling(work.samples_per_prompt, 1.0, 0, max_tokens=work.tokens)
    samples, seconds = await run.roles.rollout.generate(prompts, "measure", sampling)
    tokens = sum(len(sample.response_ids) for sample in samples)
    figures = {figure: metrics[key] for figure, key in SYNC_FIGURES.items()}
    return figures | {"tokens/s": tokens / seconds}


async def measure(cfg: Config, work: Work, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Way -> figure -> its values. The first sync and the first generation of each way warm up."""
    runs: dict[str, RunProcesses] = {}
    for way, (actor, replica) in WAYS.items():
        runs[way] = await start_way(cfg, actor, replica)
    found: dict[str, dict[str, list[float]]] = {
        way: {figure: [] for figure in FIGURES} for way in WAYS
    }
    for repeat in range(repeats + 1):
        for way, run in runs.items():
            figures = await measure_once(run, work, repeat)
            if repeat > 0:
                for figure, value in figures.items():
                    found[way][figure].append(value)
    await asyncio.gather(*(run.end() for run in runs.values()))
    return found


def run_ways(args: argparse.Namespace, folder: str) -> dict[str, dict[str, list[float]]]:
    """Build the model in the folder, start Ray and measure."""
    import ray

    cfg = make_config(Layout(args.model), folder + "/model")
    cfg.trainer.output_dir = folder
    cfg.actor.lr = 1e-3
    cfg.actor.log_prob_chunk = 128
    cfg.rollout.sampling_kwargs = {"ignore_eos": True}
    cfg.model.lora_rank = RANK
    # Ray needs resources for both ways; each of them has one process per pool.
    pools = {"rollout": [len(WAYS)], "actor": [len(WAYS)]}
    placement = dataclasses.replace(cfg.placement, pools=pools)
    start_ray(dataclasses.replace(cfg, placement=placement))
    try:
        return asyncio.run(measure(cfg, WORK[args.model], args.repeats))
    finally:
        ray.shutdown()


def table(found: dict[str, dict[str, list[float]]], model: str, repeats: int) -> str:
    """The result in Markdown."""
    rows = []
    for way, figures in found.items():
        rows.append([way, *(f"{statistics.median(figures[name]):.4g}" for name in FIGURES)])
    headings = [f"{model}, medians of {repeats}", *FIGURES]
    return "\n".join(markdown_table(headings, rows)) + "\n"


def main() -> None:
    """Measure and write the results."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument(
        "--model", choices=tuple(WORK), default="tiny", help="0.5b: the shape of Qwen2.5-0.5B"
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = run_ways(args, folder)
    markdown = table(found, args.model, args.repeats)
    write_results(args.out, {"repeats": args.repeats, "ways": found}, markdown)
    print(markdown)


if __name__ == "__main__":
    main()
