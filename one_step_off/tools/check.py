"""`--check`: try in seconds what a run would use before its first step, and start no engine.

Each check prints one line: PASS, WARN or FAIL, what was tried, and what to do. A check that needs
the result of one that failed is left out.
"""

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from agent_loop.base import LOOPS
from agent_loop.host.messages import no_proxy_variables
from agent_loop.tools import BUILT_IN
from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS
from one_step_off.algorithms.policy_losses import POLICY_LOSSES
from one_step_off.config.errors import ConfigError, noting_what_is_missing
from one_step_off.config.registry import import_object
from one_step_off.config.roles import own_optimizers
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import source_rewards
from one_step_off.config.supervised import supervised_config, warm_up_config
from one_step_off.config.text import mask_secrets
from one_step_off.config.user_code import AGENT_LOG_FOLDER, describe_error
from one_step_off.data.run_data import RunData, load_run_data
from one_step_off.data.samples import Prompt
from one_step_off.data.teacher_rows import check_teacher_sources
from one_step_off.engines.engine import find_engine
from one_step_off.monitoring.console import quiet_libraries
from one_step_off.rewards import trial_call
from one_step_off.rewards.functions import RewardFunctions
from one_step_off.rewards.reward import RewardItem, Score
from one_step_off.runtime import prepare
from one_step_off.runtime.prepare import prepare_supervised
from one_step_off.runtime.run_folder import replaced_by
from one_step_off.runtime.validation import missing_hardware, validate, validate_supervised

REWARD_ROWS = 3
"""Rows of each reward function that are scored."""

NOT_CHECKED = (
    "not checked: whether the GPUs hold the models, the engines, the weight sync, and servers of "
    "others (reward_model.url, W&B, the Ray cluster); a run of two steps shows these: "
    "trainer.total_steps=2"
)

Loops = Any
PrintLine = Callable[[str], None]


class Checks:
    """The checks of one config, and the lines that they print.

    Attributes:
        failed: names of the checks that failed.
    """

    def __init__(self, cfg: Config, print_line: PrintLine) -> None:
        self.cfg = cfg
        self.print_line = print_line
        self.failed: list[str] = []

    def line(self, status: str, name: str, text: str) -> None:
        """Print the result of a check."""
        if status == "FAIL":
            self.failed.append(name)
        one_line = " ".join(text.split())
        self.print_line(mask_secrets(f"{status}  {name:<8}  {one_line}"))

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """A ConfigError, or an exception of the user's code, that the block raises is a FAIL."""
        try:
            yield
        except ConfigError as error:
            self.line("FAIL", name, str(error))
        except (Exception, SystemExit) as error:
            self.line("FAIL", name, f"{describe_error(error)}: {error}")

    def warn(self, name: str, text: str) -> None:
        """Print a line of WARN."""
        self.line("WARN", name, text.removeprefix("warning: "))

    # --- the checks -------------------------------------------------------------------------------

    def config(self, validate_config: Callable[[], Any]) -> bool:
        """Keys that must fit together, and the files that they name. Returns whether all is
        right."""
        with self.check("config"), noting_what_is_missing() as missing:
            validate_config()
        for fault in missing:
            self.line("FAIL", "config", fault)
        if not self.failed:
            self.line("PASS", "config", "keys, values, and what must fit together")
        return not self.failed

    def machine(self) -> None:
        """What this machine lacks, and what of an earlier run would be replaced."""
        faults = [fault for fault in (missing_hardware(self.cfg), replaced_by(self.cfg)) if fault]
        for fault in faults:
            self.warn("machine", f"here a run would be refused: {fault}")
        if not faults:
            self.line("PASS", "machine", "it has the devices, and the run folder is free")

    def imports(self) -> None:
        """Import what the config names as module:function or module:Class."""
        specs = user_specs(self.cfg)
        failed = len(self.failed)
        for find in specs.values():
            with self.check("imports"):
                find()
        if len(self.failed) == failed:
            named = ", ".join(specs) or "the config names no module of yours"
            self.line("PASS", "imports", named)

    def model(self) -> Any:
        """Find the models, read their settings and the tokenizer. Returns the tokenizer, or
        None."""
        named = self.cfg.model.path
        with self.check("model"):
            prepare.find_models(self.cfg, lambda task, done: None)
            prepare.warn_of_unused_sections(self.cfg, lambda line: self.warn("model", line))
            tokenizer = prepare.check_models_and_engine(self.cfg)
            self.line("PASS", "model", f"{named}: {len(tokenizer)} tokens in the tokenizer")
            return tokenizer
        return None

    def data(self, tokenizer: Any, loops: Loops) -> RunData | None:
        """Read and tokenize all rows."""
        with self.check("data"):
            images = prepare.image_processor(self.cfg)
            data = load_run_data(self.cfg, tokenizer, lambda name: loops.get(name).tools, images)
            counts = [line for line in data.lines() if not line.startswith(" ")]
            longest = max(len(prompt.ids) for prompt in data.stream.prompts)
            self.line(
                "PASS", "data", f"{'; '.join(counts)}; the longest prompt has {longest} tokens"
            )
            for line in data.lines():
                if line.startswith(" "):
                    self.warn("data", line.strip())
            return data
        return None

    def rewards(self, data: RunData) -> None:
        """Call the reward functions with a right and a wrong response to a few rows."""
        from one_step_off.tools.trial_episode import WRONG_RESPONSE, right_response

        with self.check("reward"):
            functions = RewardFunctions(self.cfg.reward, source_rewards(self.cfg.data))
            rows = _prompts(data)
            first = trial_call.first_items(self.cfg, functions, rows, REWARD_ROWS)
            if not first:
                self.line("PASS", "reward", "the environment gives it; no function is called")
                return
            items = []
            for item in first:
                items.append(replace(item, response=right_response(item.ground_truth)))
                items.append(replace(item, response=WRONG_RESPONSE))
            result = trial_call.call_in_process(self.cfg, items)
            context = "called with a made-up response"
            fault = trial_call.find_fault(self.cfg, functions, items, result, context)
            if fault:
                drops = self.cfg.reward.on_error != "stop"
                self.line("WARN" if drops else "FAIL", "reward", fault)
            for name, item, scored in _by_function(functions, items, result.trials):
                self._show_rewards(name, item, scored)

    def _show_rewards(self, name: str, item: RewardItem, scored: list[trial_call.Trial]) -> None:
        """Print what one function gave. `scored`: for each row a right and a wrong response."""
        right = [trial.score for trial in scored[::2]]
        wrong = [trial.score for trial in scored[1::2]]
        slowest = max(trial.seconds for trial in scored)
        self.line(
            "PASS",
            "reward",
            f"{name}: {_score_text(right[0])} for {item.response[:60]!r} to data row {item.where}, "
            f"{_score_text(wrong[0])} for a wrong response; {len(right)} rows, "
            f"at most {slowest:.3f} s a call",
        )
        if right == wrong:
            self.warn(
                "reward",
                f"{name}: scored right and wrong responses alike; if it wants another form of "
                "answers than '#### ANSWER' or '\\boxed{ANSWER}', that is fine",
            )

    def agents(self, tokenizer: Any, loops: Loops, data: RunData) -> None:
        """Let each loop make one episode against canned answers."""
        from one_step_off.tools.trial_episode import try_agent_loop

        failed = len(self.failed)
        with self.check("agent"):
            prepare.check_rows(loops, data, lambda line: self.warn("agent", line))
        if len(self.failed) > failed:
            return
        for name, prompt in _first_prompts(self.cfg, _prompts(data)).items():
            with self.check("agent"), contextlib.redirect_stderr(io.StringIO()):
                works = "reward" not in self.failed
                result = try_agent_loop(self.cfg, tokenizer, name, prompt, works)
                for note in result.notes:
                    self.line("PASS", "agent", f"agent.loop={name}: {note}")
                for warning in result.warnings:
                    self.warn("agent", f"agent.loop={name}: {warning}")
                for fault in result.faults:
                    # The log was in a temporary folder.
                    fault = re.sub(rf" \({AGENT_LOG_FOLDER}/\S+\.log\)", "", fault)
                    self.line(
                        "FAIL", "agent", f"agent.loop={name}: {fault}; fix it and check again"
                    )
                if result.samples and not result.faults:
                    sample = result.samples[-1]
                    facts = sample.extra.get("agent", {})
                    self.line(
                        "PASS",
                        "agent",
                        f"agent.loop={name}: an episode against canned answers ended: "
                        f"turns {facts.get('turns', 1):.0f}, reward {sample.reward:g}, "
                        f"{result.seconds:.1f} s",
                    )

    def rest(self, data: RunData) -> None:
        """What else a run refuses before its engines start."""
        with self.check("run"):
            check_teacher_sources(self.cfg, data)
            prepare.check_profile_step(self.cfg, data.stream.total_steps)
            prepare.check_own_optimizers(self.cfg)
            prepare.canary_sequences(self.cfg, data)
            point = prepare.find_resume_point(self.cfg, data, lambda line: None)
            start = f"it resumes from {point.path}" if point else "it starts at step 0"
            self.line("PASS", "run", f"{data.stream.total_steps} steps; {start}")

    def supervised(self, cfg: Config) -> None:
        """Read the rows with answers. `cfg`: of `supervised_config`."""
        with self.check("sft"):
            lines: list[str] = []
            prepared = prepare_supervised(cfg, lines.append)
            counts = "; ".join(line for line in lines if not line.startswith(" "))
            self.line("PASS", "sft", f"{prepared.data.stream.total_steps} steps; {counts}")
            for line in lines:
                if line.startswith(" "):
                    self.warn("sft", line.strip())


def run_checks(cfg: Config, print_line: PrintLine) -> int:
    """All checks of a config for `main_ppo`. Returns the exit code."""
    _quiet()
    checks = Checks(cfg, print_line)
    if not checks.config(lambda: validate(cfg, machine=False)):
        return _end(checks)
    checks.machine()
    checks.imports()
    if cfg.trainer.sft_steps:
        checks.supervised(warm_up_config(cfg))
    tokenizer = None if checks.failed else checks.model()
    loops = None
    if tokenizer is not None:
        with checks.check("agent"):
            loops = prepare.Loops(cfg, tokenizer)
            loops.get()
    data = None if loops is None or checks.failed else checks.data(tokenizer, loops)
    if data is not None:
        checks.rewards(data)
        checks.agents(tokenizer, loops, data)
        checks.rest(data)
    return _end(checks)


def run_supervised_checks(cfg: Config, print_line: PrintLine) -> int:
    """All checks of a config for `main_sft`. Returns the exit code."""
    _quiet()
    checks = Checks(cfg, print_line)
    if checks.config(lambda: validate_supervised(cfg, machine=False)):
        checks.cfg = supervised_config(cfg)
        checks.machine()
        checks.supervised(checks.cfg)
    return _end(checks)


def _quiet() -> None:
    quiet_libraries()
    os.environ.update(no_proxy_variables())  # as a run does
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it describes an engine that is not used


def _end(checks: Checks) -> int:
    if checks.failed:
        checks.print_line(f"failed: {', '.join(dict.fromkeys(checks.failed))}")
        return 2
    checks.print_line(f"all checks passed; {NOT_CHECKED}")
    return 0


def user_specs(cfg: Config) -> dict[str, Callable[[], Any]]:
    """Each `module:function` or `module:Class` that a config names, as `key=spec`, and what imports
    it. Raises nothing itself."""
    algorithm = cfg.algorithm
    engine = cfg.rollout.engine
    found: dict[str, Callable[[], Any]] = {}

    def add(key: str, spec: str, find: Callable[[], Any]) -> None:
        is_own = re.fullmatch(r"[\w.]+:[\w.]+", spec) is not None
        if is_own:
            found[f"{key}={spec}"] = find

    add("rollout.engine", engine, lambda: find_engine(engine))
    estimator = algorithm.adv_estimator
    add("algorithm.adv_estimator", estimator, lambda: ADVANTAGE_ESTIMATORS.find(estimator))
    loss = algorithm.policy_loss
    add("algorithm.policy_loss", loss, lambda: POLICY_LOSSES.find(loss))
    of_sources = source_rewards(cfg.data)

    def find_rewards() -> RewardFunctions:
        return RewardFunctions(cfg.reward, of_sources)

    if cfg.reward.functions:
        for source, spec in cfg.reward.functions.items():
            add(f"reward.functions.{source}", spec, find_rewards)
    else:
        add("reward.function", cfg.reward.function, find_rewards)
    for source, spec in of_sources.items():
        add(f"data.train_files, {source}: reward", spec, find_rewards)
    add("agent.loop", cfg.agent.loop, lambda: LOOPS.find(cfg.agent.loop))
    for tool in map(str.strip, cfg.agent.tools.split(",")):
        if tool not in BUILT_IN and not tool.startswith("mcp:"):
            add("agent.tools", tool, lambda tool=tool: import_object("agent.tools", tool))
    for role, settings in own_optimizers(cfg).items():
        key = f"{role}.optimizer"
        spec = settings.optimizer
        add(key, spec, lambda key=key, spec=spec: import_object(key, spec))
    return found


def _prompts(data: RunData) -> list[Prompt]:
    return [*data.stream.prompts, *(data.val or ())]


def _first_prompts(cfg: Config, prompts: Iterable[Prompt]) -> dict[str, Prompt]:
    """The first row of each agent loop."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.agent_loop or cfg.agent.loop, prompt)
    return first


def _by_function(
    functions: RewardFunctions, items: list[RewardItem], trials: list[trial_call.Trial]
) -> Iterator[tuple[str, RewardItem, list[trial_call.Trial]]]:
    """The name, the first item and the results of each function whose calls all gave a score."""
    named = [functions.find(item.data_source, item.source).name for item in items]
    for name in dict.fromkeys(named):
        positions = [i for i, other in enumerate(named) if other == name]
        scored = [trials[i] for i in positions if i < len(trials)]
        has_all = len(scored) == len(positions)
        if has_all and not any(isinstance(trial.score, Exception) for trial in scored):
            yield name, items[positions[0]], scored


def _score_text(score: Score | Exception) -> str:
    if isinstance(score, dict):
        parts = ", ".join(f"{name} {value:g}" for name, value in score.items())
        return f"{sum(score.values()):g} (a dict: {parts})"
    if score is None:
        return "nothing (it was not judged in time, and counts as 0)"
    return f"{score:g} (a number)"
