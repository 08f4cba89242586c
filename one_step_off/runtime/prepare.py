"""Read a run's model and data and check them, before any engine or GPU is taken.

`prepare` returns a `RunInputs`. It does not change afterwards: what differs between the attempts of
a run is in `attempts.RunState`."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.base import Loops
from agent_loop.processes import run_to_completion
from one_step_off import checkpoint
from one_step_off.algorithms.config_checks import check_own_functions
from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.lengths import longest_row, longest_sequence
from one_step_off.config.lora_checks import sends_adapters
from one_step_off.config.placement import resolved_device
from one_step_off.config.roles import own_optimizers, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.user_code import is_user_spec
from one_step_off.data import run_data
from one_step_off.data.images import Images
from one_step_off.data.supervised_data import load_supervised_data
from one_step_off.data.teacher_rows import check_teacher_sources
from one_step_off.engines import engine
from one_step_off.engines.vllm.checks import check_teachers
from one_step_off.models.adapted_layers import engine_targets, targets_without_experts
from one_step_off.models.model_checks import (
    MODEL_SECTIONS,
    check_models,
    check_torch_companions,
)
from one_step_off.models.weight_checks import check_weights
from one_step_off.rewards import trial_call
from one_step_off.training.back_ends import worker_class
from one_step_off.training.worker_interface import INTERFACES

# Tokens per sequence of the canary. With 16 a sync passed although some tensors differed by 1 %.
CANARY_TOKENS = 32

PrintLine = Callable[[str], None]
ShowProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint from which an attempt starts: its folder, and what its state.json
    holds."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The first step that is not trained yet."""
        return self.state["step"]


@dataclass(frozen=True)
class RunInputs:
    """What is known of a run before any engine or GPU is taken.

    Attributes:
        cfg: the config; its model paths are folders or hub ids.
        device: "cpu" or "cuda".
        data: the stream of training prompts and the held-out prompts.
        canary: token ids of the sequences that trainer and engine score after each weight sync, int
            [T] each.
        canary_images: of each of them; (): the model reads none.
        tokenizer: the policy's.
        named_models: section -> the model as the user named it, as "tiny:qwen2"; "" where the
            section names none.
        loop_names: the agent loops that the rows of the data use.
        resume_point: the checkpoint that trainer.resume means; None: the run starts with the
            initial weights.
        is_supervised: whether it is trained on answers, without rollouts.
    """

    cfg: Config
    device: str
    data: run_data.RunData
    canary: list[np.ndarray]
    tokenizer: Any
    named_models: dict[str, str]
    loop_names: list[str]
    resume_point: ResumePoint | None = None
    is_supervised: bool = False
    canary_images: Sequence[Images] = ()


def load_resume_point(path: Path) -> ResumePoint:
    """The resume point of a checkpoint that has been verified."""
    return ResumePoint(path, checkpoint.read_state(path))


def prepare(
    cfg: Config,
    print_line: PrintLine,
    show_progress: ShowProgress = lambda task, done: None,
    calls_rewards: bool = True,
) -> RunInputs:
    """Find or build the models, read and check the data, find the checkpoint to resume from.

    Args:
        cfg: a validated config. Its tiny: model paths are replaced by the folders of the built
            models.
        print_line: receives notes and warnings.
        show_progress: receives what is being built and which share of it is done, 0 to 1.
        calls_rewards: whether the run will call reward functions, which are tried on one sample
            then.

    Raises:
        ConfigError: bad input, in one line that says how to fix it.
    """
    engine.find_engine(cfg.rollout.engine)  # refuses one that cannot be imported
    named_models = find_models(cfg, show_progress)
    warn_of_unused_sections(cfg, print_line)
    tokenizer = check_models_and_engine(cfg)
    warn_of_experts(cfg, print_line)
    loops = Loops(cfg, tokenizer)
    loops.get()  # refuses a loop that cannot be loaded before the data is read
    images = image_processor(cfg)
    data = run_data.load_run_data(
        cfg, tokenizer, lambda loop_name: loops.get(loop_name).tools, images
    )
    for line in data.lines():
        print_line(line)
    loop_names = check_rows(loops, data, print_line)
    check_teacher_sources(cfg, data)
    check_profile_step(cfg, data.stream.total_steps)
    if calls_rewards:
        trial_call.check_reward_functions(cfg, data, print_line)
    check_own_code(cfg)
    canary = canary_sequences(cfg, data)
    resume_point = find_resume_point(cfg, data, print_line)
    return RunInputs(
        cfg,
        resolved_device(cfg),
        data,
        [ids for ids, _ in canary],
        tokenizer,
        named_models,
        loop_names,
        resume_point,
        canary_images=() if images is None else [own for _, own in canary],
    )


def prepare_supervised(
    cfg: Config,
    print_line: PrintLine,
    show_progress: ShowProgress = lambda task, done: None,
) -> RunInputs:
    """As `prepare`, for a run of supervised steps.

    Args:
        cfg: of `supervised_config`, validated.
        print_line, show_progress: see `prepare`.

    Raises:
        ConfigError: bad input, in one line that says how to fix it.
    """
    named_models = find_models(cfg, show_progress)
    tokenizer = check_models(cfg, longest_row(cfg))
    warn_of_experts(cfg, print_line)
    check_weights(cfg)
    data = load_supervised_data(cfg, tokenizer, _stop_ids(cfg, tokenizer))
    for line in data.lines():
        print_line(line)
    check_profile_step(cfg, data.stream.total_steps)
    check_own_back_ends(cfg, supervised=True)
    check_own_optimizers(cfg)
    resume_point = find_resume_point(cfg, data, print_line)
    return RunInputs(
        cfg,
        resolved_device(cfg),
        data,
        [],
        tokenizer,
        named_models,
        [],
        resume_point,
        is_supervised=True,
    )


def _stop_ids(cfg: Config, tokenizer: Any) -> frozenset[int]:
    """The tokens at which an engine with this model ends a response: those of its generation
    config, and the tokenizer's."""
    from transformers import GenerationConfig

    stop_ids: list[int | None] = [tokenizer.eos_token_id]
    with contextlib.suppress(OSError):  # the model may have no generation config
        eos: Any = GenerationConfig.from_pretrained(cfg.model.path).eos_token_id
        stop_ids += eos if isinstance(eos, list) else [eos]
    return frozenset(stop_id for stop_id in stop_ids if stop_id is not None)


def is_complete(prepared: RunInputs, print_line: PrintLine) -> bool:
    """Whether the run that would be resumed has nothing left to do; prints how to train further
    then."""
    cfg = prepared.cfg
    resume_point = prepared.resume_point
    total_steps = prepared.data.stream.total_steps
    if resume_point is None or cfg.trainer.val_only or resume_point.step < total_steps:
        return False
    # The summary is the last file of a run. Without it the run was killed before its model was
    # written.
    has_summary = (Path(cfg.trainer.output_dir) / "summary.json").exists()
    if cfg.trainer.save_hf_model and not has_summary:
        return False
    print_line(
        f"{resume_point.path} has {resume_point.step} of {total_steps} steps: "
        "nothing left to do; "
        "raise trainer.total_steps, or start over with trainer.resume=never trainer.overwrite=true"
    )
    return True


def find_models(cfg: Config, show_progress: ShowProgress) -> dict[str, str]:
    """Build tiny models, and put their folders into the config. Returns section -> the model as the
    user named it. Raises ConfigError."""
    check_torch_companions()
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    named_models = {section: getattr(cfg, section).path for section in MODEL_SECTIONS}
    _build_tiny_models(cfg, named_models, show_progress)
    return named_models


def find_resume_point(
    cfg: Config, data: run_data.RunData, print_line: PrintLine
) -> ResumePoint | None:
    """The checkpoint that trainer.resume means, with the data at its position. An evaluation alone
    trains on no data, so its own may be others. Raises ConfigError."""
    resume_path = checkpoint.find(cfg, print_line)
    if resume_path is None:
        return None
    resume_point = load_resume_point(resume_path)
    if not cfg.trainer.val_only:
        data.stream.load_state_dict(resume_point.state["stream"])
    return resume_point


def image_processor(cfg: Config) -> Any:
    """The `ImageProcessor` of the policy's model; None: it reads no images. Raises ConfigError."""
    from one_step_off.models import vision  # transformers: slow to import

    if vision.policy_vision_config(cfg) is None:
        return None
    return vision.ImageProcessor(cfg.model.path)


def check_own_code(cfg: Config) -> None:
    """What the user wrote must be importable before the engines start, and an optimizer must work.
    Raises ConfigError."""
    check_own_functions(cfg)
    check_own_back_ends(cfg)
    check_own_optimizers(cfg)
    if cfg.pipeline.batch_source != "auto":
        from one_step_off.rollout.batch_sources import own_source  # slow, and few runs need it

        own_source(cfg)


def check_own_back_ends(cfg: Config, supervised: bool = False) -> None:
    """Raises ConfigError: a back end of the user's own has no worker for a role of this run."""
    for role in cfg.placement.roles.keys() & INTERFACES.keys():
        back_end = role_settings(cfg, role).backend
        if is_user_spec(back_end):
            worker_class(f"{role}.backend", back_end, "supervised" if supervised else role)


def check_own_optimizers(cfg: Config) -> None:
    """Raises ConfigError: an optimizer of the user's own does not work."""
    if own_optimizers(cfg):
        from one_step_off.training import optimizer_trial  # FSDP2: slow to import

        optimizer_trial.check_user_optimizers(cfg)


def _build_tiny_models(
    cfg: Config, named_models: dict[str, str], show_progress: ShowProgress
) -> None:
    """Build the models of the form tiny:NAME once per machine, and put their folders into the
    config."""

    def built(key: str, path: str) -> str:
        from one_step_off.models import tiny_qwen, tiny_vision

        what = f"{key}={path}: cannot be cached in {tiny_qwen.cache_dir()}"
        with as_config_error(what, "set ONE_STEP_OFF_CACHE to another folder", OSError):
            if path == "tiny:vision":
                return tiny_vision.ensure(progress=show_progress)
            return tiny_qwen.ensure(path, progress=show_progress)

    for section, path in named_models.items():
        if path.startswith("tiny:"):
            getattr(cfg, section).path = built(f"{section}.path", path)
    teachers = cfg.teacher.by_source
    for source, path in teachers.items():
        if path.startswith("tiny:"):
            teachers[source] = built(f"teacher.by_source.{source}", path)


def warn_of_unused_sections(cfg: Config, print_line: PrintLine) -> None:
    """Settings of critic, reference, reward model or teacher have no effect without that role."""
    if cfg.reward_model.url:
        return
    for role in MODEL_SECTIONS[1:]:
        if role in cfg.placement.roles:
            continue
        settings = getattr(cfg, role)
        defaults = type(settings)()
        changed = [
            f"{role}.{name}"
            for name, value in vars(settings).items()
            if value != getattr(defaults, name)
        ]
        if changed:
            keys = ", ".join(changed)
            print_line(
                f"warning: {keys}: this run has no role {role} that reads them; see placement.roles"
            )


def warn_of_experts(cfg: Config, print_line: PrintLine) -> None:
    """Say which names of model.lora_target_modules leave routed experts as they are."""
    if not cfg.model.lora_rank or cfg.model.trust_remote_code:
        return
    names = targets_without_experts(cfg)
    if names:
        print_line(
            f"warning: model.lora_target_modules={cfg.model.lora_target_modules}: routed experts "
            f"get no adapters, only the other layers named {', '.join(names)}"
        )


def check_models_and_engine(cfg: Config) -> Any:
    """Check all models, and what the engines make of the config. Returns the policy's
    tokenizer."""
    tokenizer = check_models(cfg, longest_sequence(cfg))
    engine.check(cfg)
    has_teacher = "teacher" in cfg.placement.roles
    if has_teacher and role_settings(cfg, "teacher").backend == "vllm":
        check_teachers(cfg)
    check_weights(cfg)
    if sends_adapters(cfg):
        engine_targets(cfg)  # raises where the engine can hold no adapters of the model
    return tokenizer


def check_rows(loops: Loops, data: run_data.RunData, print_line: PrintLine) -> list[str]:
    """Let each agent loop check the first of its rows. Returns the names of the loops. Raises
    ConfigError."""
    first_prompts: dict[str, run_data.Prompt] = {}
    for prompt in [*data.stream.prompts, *(data.val or ())]:
        loop_name = prompt.agent_loop or loops.cfg.agent.loop
        first_prompts.setdefault(loop_name, prompt)
    external = [name for name in first_prompts if loops.get(name).needs_endpoint]
    has_images = any(prompt.images for prompt in first_prompts.values())
    if has_images and external:
        raise ConfigError(
            f"agent.loop={external[0]}: external agents receive text alone, and "
            f"{loops.cfg.model.path} is trained on images; use single_turn, or a text model"
        )
    _check_external_loops(loops.cfg, external)
    if external:
        engine.check_agents(loops.cfg, external[0])
    for loop_name, prompt in first_prompts.items():
        run_to_completion(loops.get(loop_name).check(prompt))
    for loop_name in loops.cfg.agent.loop_kwargs:
        if loop_name not in first_prompts:
            print_line(f"warning: agent.loop_kwargs.{loop_name}: no row of this run uses that loop")
    names_tools = bool(loops.cfg.agent.tools.strip(" ,"))
    uses_tools = any(loops.get(loop_name).tools for loop_name in first_prompts)
    if names_tools and not uses_tools:
        print_line(
            f"warning: agent.tools={loops.cfg.agent.tools}: no loop of this run uses tools; "
            "set agent.loop=tool"
        )
    for key in ("command", "environment"):
        agent = getattr(loops.cfg.agent, key)
        if agent and not external:
            print_line(
                f"warning: agent.{key}={agent}: no row of this run uses external agents; "
                "set agent.loop=external"
            )
    return list(first_prompts)


def _check_external_loops(cfg: Config, external: list[str]) -> None:
    """Refuse what external agents cannot have. A reward model reads one prompt with one response;
    an episode of theirs may have several, with contexts of their own, and none stands for all. On a
    lent device it would end with the loan.

    `external`: the loops of this run with such agents.
    """
    if external and cfg.placement.lend:
        raise ConfigError(
            f"placement.lend=true does not go with agent.loop={external[0]}: an agent's episode "
            "cannot move to another replica; set it to false"
        )
    has_reward_model = bool(cfg.reward_model.url) or "reward_model" in cfg.placement.roles
    if external and has_reward_model:
        key = "reward_model.url" if cfg.reward_model.url else "placement.roles.reward_model"
        value = cfg.reward_model.url or cfg.placement.roles["reward_model"]
        raise ConfigError(
            f"{key}={value}: cannot score episodes of agent.loop={external[0]}, which may have "
            "several contexts; remove it, and score them with reward.function or in the agent"
        )


def check_profile_step(cfg: Config, total_steps: int) -> None:
    """Raises ConfigError: the run has no step `trainer.profile_step`."""
    profile_step = cfg.trainer.profile_step
    if profile_step is not None and profile_step >= total_steps:
        raise ConfigError(
            f"trainer.profile_step={profile_step}: must be below {total_steps}, the run's steps; "
            "they are counted from 0"
        )


def canary_sequences(cfg: Config, data: run_data.RunData) -> list[tuple[np.ndarray, Images]]:
    """The last tokens of the first prompts; with images all tokens, and the images. A log-prob
    needs a token before it, so prompts of one token are left out."""
    long_enough = (prompt for prompt in data.stream.prompts if len(prompt.ids) > 1)
    chosen = itertools.islice(long_enough, cfg.weight_sync.canary_sequences)
    canary = []
    for prompt in chosen:
        ids = prompt.ids if prompt.images else prompt.ids[-CANARY_TOKENS:]
        canary.append((ids, prompt.images))
    if not canary:
        raise ConfigError(
            "data.train_files: no prompt has at least two tokens, which the canary of the weight "
            "sync needs"
        )
    return canary
