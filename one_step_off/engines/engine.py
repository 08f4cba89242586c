"""The Engine seam: what a rollout replica asks of the engine that generates its tokens.

An engine is a plain object in the replica's process, and may have processes of its own. It holds
the policy in one or more workers (`tensor_parallel_size`), each of which is a receiver of the
weight sync. The replica, `rollout/replica.py`, knows nothing more of it. How to add one:
docs/how_to/add_an_engine.md. What every engine guarantees:

- Nothing is generated between `pause` and `resume`, and a token is sampled with the weights whose
  version the last `resume` named. Each token carries that version.
- Log-probs are those of the distribution that tokens are sampled from, in nats, after temperature.
- `call_workers` runs in all workers at once, each between two of its forward passes.
- After `pause(clear_cache=True)` nothing that older weights computed is used again.
- A request whose task is cancelled is given up soon, and `has_unfinished_requests` says when.
- A process of the engine that dies makes `errored` true and fails the requests under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import psutil

from agent_loop.trajectory import Generated
from one_step_off.config.errors import ConfigError, key_error, value_error
from one_step_off.config.quantization import is_quantized, quantized_keys
from one_step_off.config.registry import ENGINES, check_name, import_object
from one_step_off.config.schema import Config
from one_step_off.data.images import Images
from one_step_off.data.samples import PolicyVersion


@dataclass(frozen=True)
class GenerationRequest:
    """One turn to generate.

    Attributes:
        ids: the context, int32 [T].
        max_tokens: tokens of the answer at most.
        temperature: 0 is greedy decoding.
        top_p: for evaluation only.
        seed: of this request alone; None: the engine's own random numbers.
        stop: texts that end the answer, besides those of `rollout.sampling_kwargs`.
        images: the encoded images of the context, each with as many tokens in `ids` as it has
            parts.
    """

    ids: np.ndarray
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    images: Images = ()


@dataclass(frozen=True)
class EngineLoad:
    """How full an engine is, a moment ago.

    Attributes:
        running: requests that it works on. Where it has preempted some since the last report: as
            many as had room then.
        waiting: requests in its queue.
        kv_usage: the share of its KV cache that requests hold, 0 to 1. 0 for an engine that begins
            only what has room to its end.
        preemptions: since the start, requests whose part of the cache went to others, because it
            was full. What they had is computed again.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0


class Engine(Protocol):
    """See the module. `create(cfg, device, seed, log)` makes one, and loads nothing. Before `start`
    only `errored`, `processes` and `shutdown` are called.

    An engine's class may have a static method `check(cfg)` that raises ConfigError for what the
    engine cannot do. It is called where a run is prepared, before anything is started. It may have
    `returns_experts`: with `rollout.replay_routing` each `Generated` has its experts;
    `quantizes`: it knows `rollout.quantization` and `rollout.kv_cache_dtype`; `speculates`: it
    obeys `rollout.speculation`, and each `Generated` has `draft_tokens`. Its engines may have
    `start_note`: after `start`, a line for the console; `longest_sequences`: after `start`, how
    many requests of the greatest length its KV cache has room for, where others are preempted.

    Attributes:
        max_sequences: how many requests it works on at once; known after `start`.
        finished_requests, started_requests: counts since the start, for the heartbeat.
        load: how full it is; the replica asks for it whenever a request begins or ends.
    """

    max_sequences: int
    load: EngineLoad
    started_requests: int
    finished_requests: int

    async def start(self) -> None:
        """Load the model, and be ready for `call_workers`.

        Raises:
            ProcessDied: a process of the engine was killed.
            RuntimeError: it did not start; the message names the reason.
        """

    def processes(self) -> Sequence[psutil.Process]:
        """Its own processes below this one, so that a dead or stopped one is noticed."""

    @property
    def errored(self) -> bool:
        """Whether it has died."""

    async def generate(self, request: GenerationRequest) -> Generated:
        """The tokens that follow `request.ids`. Raises RuntimeError: the engine died."""

    async def score(self, ids: np.ndarray, images: Images = ()) -> np.ndarray:
        """Log-probs (nats, temperature 1) of every token of `ids`, int32 [T], but the first:
        float32 [T - 1]. `images`: see `GenerationRequest`."""

    async def heartbeat(self) -> None:
        """Return once the engine answers, between two of its steps."""

    def has_unfinished_requests(self) -> bool:
        """Whether it works on a request, a cancelled one included."""

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every `Worker`. Returns the answers, in the order of the workers.

        Raises:
            SyncError: a worker failed; the message is the worker's own.
        """

    async def pause(self, wait: bool, clear_cache: bool) -> None:
        """Generate nothing more until `resume`.

        Args:
            wait: first finish all requests; else they go on where they were after `resume`.
            clear_cache: forget what was computed of them, so that it is computed again.
        """

    async def resume(self, version: PolicyVersion) -> None:
        """Go on, with the weights of this version in every worker."""

    async def sleep(self) -> None:
        """Free the device's memory; the next sync brings the weights back. On a CPU it idles."""

    async def wake_up(self, tags: list[str]) -> None:
        """Take memory again for "weights" or "kv_cache"; nothing where it does not sleep."""

    def shutdown(self) -> None:
        """End its processes."""


class Worker(Protocol):
    """What `Engine.call_workers` reaches: a part of the model, and a receiver of the weight sync.
    Arguments and answers are plain data, since they may cross process borders. With
    `receiving_worker.ReceivingWorker` one is written in a few lines."""

    def kv_cache_bytes(self) -> int:
        """The size of its KV cache."""

    def learn_shards(self, shapes: dict[str, Any], expects_deltas: bool) -> dict[str, Any]:
        """Which parts of the checkpoint's tensors it keeps.

        Args:
            shapes: name of a tensor -> [name of its dtype, its shape], of all that are sent.
            expects_deltas: whether updates may be differences from what it has.

        Returns:
            "kept": name -> [[start, stop] of each box], see `shard_blocks.plain_shards`; None:
            whole tensors must travel, because of "reason".
        """

    def prove_base(self, shapes: dict[str, Any], blocks: list[list[Any]]) -> dict[str, Any]:
        """In place of `learn_shards` with weight_sync.lora=adapter: compare the frozen model with
        the trainer's.

        Args:
            shapes: of the adapter's matrices, as for `learn_shards`.
            blocks: of `base_weights.BaseModel`.

        Raises:
            SyncError: it is another model.
        """

    def connect_sync(self, info: dict[str, Any]) -> None:
        """Join the senders' groups; see `ReceivingWorker.join_groups`. Called again with the next
        epoch, whenever trainers or replicas were restarted. Raises SyncError."""

    def sync_weights(self, version: int, sharded_only: bool = False) -> dict[str, Any]:
        """Receive one whole update, and put it to use.

        Args:
            version: of the weights.
            sharded_only: the parts of `learn_shards` come, not whole tensors.

        Returns:
            The report of `WeightReceiver.receive`. "layout_proved": whether the next update may be
            `sharded_only`; "in_place": whether this one was. Both may be left out.

        Raises:
            SyncError: the update is not complete and exact. The model must not be used until
                another one was.
        """


class ServesAgents(Protocol):
    """What an engine has besides, if external agents can use it (agent.loop=external)."""

    @staticmethod
    def check_agents(cfg: Config) -> None:
        """Check `agent.tool_parser` and `agent.reasoning_parser`; called as `check`. Raises
        ConfigError."""

    def agent_serving(self, tokenizer: Any) -> Any:
        """What answers the requests of agents, an `endpoint.replica_server.AnswersRequests`; called
        once, after `start`. `tokenizer`: the policy's."""


CreateEngine = Callable[[Config, str, int, str], Engine]
"""(config, "cpu" or "cuda", seed of the engine, file with the output of this process or "")."""


def find_engine(spec: str) -> CreateEngine:
    """What creates the engine `spec`: a name of `ENGINES`, or the user's own `module:Class`.

    Raises:
        ConfigError: there is none.
    """
    check_name("rollout.engine", spec, ENGINES)
    create = import_object("rollout.engine", ENGINES.get(spec, spec))
    if not callable(create):
        kind = type(create).__name__
        raise ConfigError(f"rollout.engine={spec!r}: is a {kind}, not callable; name a class")
    return create


def check(cfg: Config) -> None:
    """Let the engine of a run refuse what it cannot do. Raises ConfigError."""
    create = find_engine(cfg.rollout.engine)
    if cfg.rollout.replay_routing and not getattr(create, "returns_experts", False):
        raise ConfigError(
            f"rollout.replay_routing=true: rollout.engine={cfg.rollout.engine} does not return the "
            "experts that it chose; use rollout.engine=vllm, or set this to false"
        )
    if is_quantized(cfg) and not getattr(create, "quantizes", False):
        raise key_error(
            cfg,
            quantized_keys(cfg),
            f"rollout.engine={cfg.rollout.engine} quantizes nothing; remove it, or use "
            "rollout.engine=vllm",
        )
    if cfg.rollout.speculation != "none" and not getattr(create, "speculates", False):
        raise value_error(
            "rollout.speculation",
            cfg.rollout.speculation,
            f"rollout.engine={cfg.rollout.engine} proposes no draft tokens; use "
            "rollout.engine=vllm, or set this to none",
        )
    if hasattr(create, "check"):
        create.check(cfg)


def check_agents(cfg: Config, loop_name: str) -> None:
    """Check that the engine of a run serves external agents. `loop_name`: the loop that has them.

    Raises:
        ConfigError: it does not, or has not the parsers that the config names.
    """
    create: Any = find_engine(cfg.rollout.engine)
    if not hasattr(create, "agent_serving"):
        raise ConfigError(
            f"agent.loop={loop_name}: rollout.engine={cfg.rollout.engine} serves no external "
            "agents; use rollout.engine=vllm"
        )
    create.check_agents(cfg)
