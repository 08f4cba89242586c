"""A trial call of each reward function of the user, before any engine starts.

The call runs in a process of its own, because the function may hang or kill its process.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from one_step_off.config.errors import ConfigError, located_config_error
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import source_rewards
from one_step_off.config.user_code import find_user_line
from one_step_off.data.run_data import RunData
from one_step_off.data.samples import Prompt
from one_step_off.rewards.functions import RewardFunctions
from one_step_off.rewards.reward import TIMEOUT, RewardError, RewardItem, Score
from one_step_off.rewards.scoring import Scorer
from one_step_off.rewards.time_limit import GRACE_S

EXIT_TIMEOUT_S = 5.0  # for the process to exit after its time is up
_CONTEXT = "called before the start, with the ground truth as the response"
# The child gets the parent's path: modules of the user may be found nowhere else.
_CHILD_CODE = (
    "import pickle, sys; "
    "sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from one_step_off.rewards.trial_call import run_child; "
    "run_child()"
)


@dataclass(frozen=True)
class Trial:
    """What became of one call: the score, or why there is none, and how long it took."""

    score: Score | RewardError
    seconds: float


@dataclass(frozen=True)
class TrialResult:
    """What became of the calls.

    Attributes:
        imported: the functions could be imported.
        trials: one for each response that was scored.
        exit_code: of the process; None: it was killed because it did not end.
        output: what it printed.
    """

    imported: bool
    trials: list[Trial]
    exit_code: int | None
    output: str


def check_reward_functions(cfg: Config, data: RunData, print_line: Callable[[str], None]) -> None:
    """Find the function of every row, and call each of the user's on its first row.

    Raises:
        ConfigError: a function cannot be imported or called, or a row has none; or, with
            `reward.on_error=stop`, the call raises, hangs, kills its process or returns no reward.
            With another `reward.on_error`, `print_line` receives a warning instead.
    """
    functions = RewardFunctions(cfg.reward, source_rewards(cfg.data))
    prompts = [*data.stream.prompts, *(data.val or ())]
    items = []
    for item in first_items(cfg, functions, prompts):
        if not functions.find(item.data_source, item.source).built_in:
            items.append(item)
    if not items:
        return
    fault = find_fault(cfg, functions, items, call_in_process(cfg, items))
    if fault and cfg.reward.on_error == "stop":
        raise ConfigError(fault)
    if fault:
        print_line(f"warning: {fault}")


def first_items(
    cfg: Config, functions: RewardFunctions, prompts: Iterable[Prompt], rows: int = 1
) -> list[RewardItem]:
    """The first `rows` rows of each function, with the ground truth as the response. Raises
    ConfigError: a row has no function."""
    items: dict[str, list[RewardItem]] = {}
    for prompt in prompts:
        if (prompt.agent_loop or cfg.agent.loop) == "environment":
            continue  # the environment gives the reward itself
        with located_config_error(f"data row {prompt.where}: "):
            function = functions.find(prompt.data_source, prompt.source)
        of_function = items.setdefault(function.name, [])
        if len(of_function) == rows:
            continue
        item = RewardItem(
            prompt.id,
            0,
            prompt.text,
            response=prompt.ground_truth,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra_info=prompt.extra,
            where=prompt.where,
            source=prompt.source,
        )
        of_function.append(item)
    return [item for of_function in items.values() for item in of_function]


def find_fault(
    cfg: Config,
    functions: RewardFunctions,
    items: list[RewardItem],
    result: TrialResult,
    context: str = _CONTEXT,
) -> str:
    """What is wrong with the first call that failed, in one line; empty: nothing.

    Args:
        result: of `call_in_process` for these items.
        context: what the functions were called with, in words.
    """
    for trial in result.trials:
        if isinstance(trial.score, RewardError):
            fix = _fix(trial.score.kind == TIMEOUT)
            return f"{trial.score} ({context}); {fix}"
    if len(result.trials) == len(items):
        return ""
    return _process_fault(cfg, functions, items[len(result.trials)], result, context)


def _fix(is_timeout: bool) -> str:
    if is_timeout:
        return "raise reward.timeout_s, or fix the function"
    return "fix the function, or set reward.on_error=drop to continue without such samples"


def _process_fault(
    cfg: Config, functions: RewardFunctions, item: RewardItem, result: TrialResult, context: str
) -> str:
    """Why the process ended, or hung, before it had scored `item`."""
    function = functions.find(item.data_source, item.source)
    subject = f"{function.name}, {item}"
    if not result.imported:
        printed = result.output.strip().splitlines() or ["it prints nothing"]
        problem = f"its module cannot be imported in a separate process: {printed[-1][:300]}"
        return f"{subject}: {problem}; fix it"
    # The output holds the traceback of faulthandler.
    place = find_user_line(result.output, function.file, deepest_first=True)
    location = f" at {place}" if place else ""
    if result.exit_code is None or "Timeout (" in result.output:
        limit = f"reward.timeout_s={cfg.reward.timeout_s:g} s"
        problem = f"did not end within {limit}{location}, nor by its alarm"
        return f"{subject}: {problem} ({context}); {_fix(is_timeout=True)}"
    if result.exit_code < 0:
        problem = f"killed its process (signal {-result.exit_code})"
    else:
        problem = f"ended its process (code {result.exit_code})"
    return f"{subject}: {problem}{location} ({context}); {_fix(is_timeout=False)}"


def call_in_process(cfg: Config, items: list[RewardItem]) -> TrialResult:
    """Score the items one after another in a child process. Its start and imports have
    `trainer.start_timeout_s`.
    """
    calls_s = len(items) * (cfg.reward.timeout_s + GRACE_S)
    timeout_s = cfg.trainer.start_timeout_s + calls_s + EXIT_TIMEOUT_S
    path = [os.getcwd() if folder == "" else folder for folder in sys.path]
    message = pickle.dumps(path) + pickle.dumps((cfg.reward, source_rewards(cfg.data), items))
    with tempfile.TemporaryFile() as results, tempfile.TemporaryFile() as output:
        # In a process group of its own: what the function starts ends with it, and Ctrl-C is for
        # the parent.
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD_CODE, str(results.fileno())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[results.fileno()],
            start_new_session=True,
        )
        exit_code = None
        try:
            child.communicate(message, timeout=timeout_s)
            exit_code = child.returncode
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_group(child)
        imported, *trials = _read_results(results) or [False]
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
        return TrialResult(bool(imported), trials, exit_code, text)


def _kill_group(child: subprocess.Popen) -> None:
    """End the child and all that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        pass
    child.wait()


def _read_results(results: Any) -> list[Any]:
    """The whole objects of a file; the last may be cut off by the death of the process."""
    results.seek(0)
    objects = []
    while True:
        try:
            objects.append(pickle.load(results))
        except (EOFError, pickle.UnpicklingError):
            return objects


def run_child() -> None:
    """The child process: score the items that stdin holds, and write each result as soon as it is
    there.
    """
    cfg, of_sources, items = pickle.load(sys.stdin.buffer)
    scorer = Scorer(cfg, of_sources)
    with open(int(sys.argv[1]), "wb", buffering=0) as results:
        results.write(pickle.dumps(True))
        for item in items:
            begin = time.monotonic()
            (score,) = scorer.score_batch([item])
            results.write(pickle.dumps(Trial(score, time.monotonic() - begin)))
    os._exit(0)  # threads of the function may never end
