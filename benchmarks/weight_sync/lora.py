"""LoRA's two ways into vLLM: rows merged by the trainer, as the program has it, or adapters alone into vLLM's own LoRA.

    python -m benchmarks.lora --out DIR [--model tiny|0.5b] [--repeats 5]

Real Ray, FSDP2 and vLLM in bf16, all linear layers, rank 8; a trainer rank and an engine for each way, measured in
turns after one update. The second way is nowhere but here. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.backends import make_batch
from benchmarks.weight_sync.layout import Layout, make_config
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.ray_trainer import Roles
from one_step_off.rollout import vllm_replica as vllm_rollout
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.vllm_replica import RolloutReplica
from one_step_off.runtime import launch
from one_step_off.runtime import processes as roles
from one_step_off.runtime.processes import RunProcesses
from one_step_off.training.fsdp_workers import ActorWorker
from one_step_off.weight_sync.vllm_receiver import SyncWorkerExtension
from one_step_off.weight_sync.weight_piece import WeightPiece

RANK = 8
WORK = {
    "tiny": (16, 4, 32),
    "0.5b": (4, 4, 16),
}  # prompts of 64 tokens, samples of each, tokens of each sample


class AdapterActor(ActorWorker):
    """Sends A and B themselves, by peft's names (on one rank)."""

    def _own_weights(self) -> list[tuple[WeightPiece, Any]]:
        named = (
            (n.replace(".default", ""), p)
            for n, p in self.model.named_parameters()
            if ".lora_" in n
        )
        return [
            (WeightPiece(n, self.cfg.model.dtype, tuple(p.shape), 0, len(p)), p) for n, p in named
        ]


class AdapterExtension(SyncWorkerExtension):
    """In vLLM's worker: puts what comes into the engine's LoRA manager, from memory."""

    def sync_weights(self, version: int) -> dict[str, float]:
        """One whole update."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        tensors, own = {}, self.model_runner.lora_manager

        def keep(bucket: list[tuple[str, Any]]) -> None:
            tensors.update((f"base_model.model.{name}", tensor.clone()) for name, tensor in bucket)

        report = self.weight_transfer_engine.receiver.receive(keep, version)
        settings = PEFTHelper(r=RANK, lora_alpha=32, target_modules="all-linear")
        adapter = LoRAModel.from_lora_tensors(
            1, tensors, settings, str(own.device), own.lora_config.lora_dtype
        )
        own._adapter_manager.remove_adapter(1)
        own._adapter_manager.add_adapter(adapter)
        own._adapter_manager.activate_adapter(1)
        return report


class AdapterReplica(RolloutReplica):
    """An engine with vLLM's LoRA, whose requests all ask for the adapter."""

    async def start(
        self, former: Sequence[tuple[int, float]] = ()
    ) -> tuple[int, list[tuple[int, float]]]:
        """As `RolloutReplica.start`."""
        from vllm.lora.request import LoRARequest

        self.lora, plain = LoRARequest("actor", 1, "in memory"), vllm_rollout.engine_args
        own = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
        own["worker_extension_cls"] = "benchmarks.weight_sync.lora.AdapterExtension"
        vllm_rollout.engine_args = lambda *args: plain(*args) | own
        return await super().start(former)

    async def _request(self, ids: np.ndarray, params: Any) -> Any:
        self.started_requests += 1
        what = {"prompt_token_ids": ids.tolist()}, params, str(self.started_requests)
        return [out async for out in self.engine.generate(*what, lora_request=self.lora)][-1]


WAYS = {
    "merged by the trainer": (ActorWorker, RolloutReplica),
    "adapters into vLLM": (AdapterActor, AdapterReplica),
}
FIGURES = {
    "seconds": "sync/transfer_s",
    "bytes": "sync/bytes",
    "pack": "sync/gather_s",
    "load": "sync/load_s",
}
FIGURES |= {f"canary, {kind}": f"canary/logprob_diff_{kind}" for kind in ("max", "mean")} | {
    "tokens/s": ""
}


async def measure(cfg: Config, model: str, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Per way the lists of FIGURES; the first sync and the first generation of each warm up."""
    prompts, n, length = WORK[model]
    ids = np.random.default_rng(1).integers(0, 300, (prompts, 64)).astype(np.int32)
    teams: dict[str, Roles] = {}
    runs: list[RunProcesses] = []
    found: dict[str, dict[str, list[float]]] = {
        name: {figure: [] for figure in FIGURES} for name in WAYS
    }
    for name, (roles.WORKERS["actor"], roles.RolloutReplica) in WAYS.items():
        runs.append(RunProcesses(launch.prepare(cfg, lambda line: None)))
        teams[name] = runs[-1].roles
        await asyncio.gather(teams[name].actor.setup(), teams[name].rollout.setup())
        await teams[name].sync.connect()
        await teams[name].sync((0, 0))  # an update waits until the weights before it have been sent
        await teams[name].actor.update(make_batch("0.5b"))
    for k in range(repeats + 1):
        for name, team in teams.items():
            sync, work = (
                await team.sync((0, 1)),
                [Prompt((k, i), row, "", "1") for i, row in enumerate(ids)],
            )
            samples, seconds = await team.rollout.generate(
                work, "measure", Sampling(n, 1.0, 0, max_tokens=length)
            )
            sync[""] = sum(len(s.response_ids) for s in samples) / seconds
            for figure, key in FIGURES.items() if k else ():
                found[name][figure].append(sync[key])
    await asyncio.gather(*(run.end() for run in runs))
    return found


def main() -> None:
    """Parse, measure, write."""
    import ray

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--model", choices=tuple(WORK), default="tiny", help="0.5b: the shape of Qwen2.5-0.5B"
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        cfg = make_config(Layout(args.model), folder + "/model")
        cfg.trainer.output_dir, cfg.actor.lr, cfg.rollout.sampling_kwargs = (
            folder,
            1e-3,
            {"ignore_eos": True},
        )
        cfg.model.lora_rank, cfg.actor.log_prob_chunk = RANK, 128
        seats = {"rollout": [len(WAYS)], "actor": [len(WAYS)]}
        launch.start_ray(
            dataclasses.replace(cfg, placement=dataclasses.replace(cfg.placement, pools=seats))
        )
        try:
            found = asyncio.run(measure(cfg, args.model, args.repeats))
        finally:
            ray.shutdown()
    lines = [
        f"| {args.model}, medians of {args.repeats} | {' | '.join(FIGURES)} |",
        "| --- |" + " --- |" * len(FIGURES),
    ]
    for name, of in found.items():
        lines.append(
            f"| {name} | {' | '.join(f'{statistics.median(of[figure]):.4g}' for figure in FIGURES)} |"
        )
    (args.out / "result.json").write_text(
        json.dumps({"repeats": args.repeats, "ways": found}, indent=2)
    )
    (args.out / "result.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
