"""Each reward function of the user's own is called once, before any engine starts, in a process that may hang or die."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from one_step_off.config.schema import Config, ConfigError, RewardConfig
from one_step_off.config.user_code import find_user_line
from one_step_off.data.prompt_stream import RunData
from one_step_off.data.samples import Prompt
from one_step_off.rewards.scoring import GRACE_S, RewardError, RewardFunctions, RewardItem, Scorer

SLACK_S = 5.0  # for a process to end after its time is up
# The parent's path: modules of the user's own may be found nowhere else.
_CHILD = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from one_step_off.rewards.trial_call import answer; answer()"


@dataclass(frozen=True)
class Answer:
    """What became of the trial.

    Attributes:
        ready: the functions were imported.
        found: one entry for each response that was judged: the RewardError, or None where all is well.
        code: the exit code of the process; None: it was killed because it did not end.
        output: what it printed.
    """

    ready: bool
    found: list[RewardError | None]
    code: int | None
    output: str


def check_reward_functions(cfg: Config, data: RunData, say: Callable[[str], None]) -> None:
    """Find the function of every row, and call each of the user's own on its first one, with the ground truth as the
    response.

    Raises:
        ConfigError: a function cannot be had or called, a row has none, or, with `reward.on_error=stop`, the call raises,
            hangs, kills its process or returns no reward. With another `reward.on_error` `say` receives a warning.
    """
    functions = RewardFunctions(cfg.reward)
    items = first_items(cfg, functions, [*data.stream.prompts, *(data.val or ())])
    if not items:
        return
    why = faults_of(cfg, functions, items)
    if why and cfg.reward.on_error == "stop":
        raise ConfigError(why)
    if why:
        say(f"warning: {why}")


def first_items(
    cfg: Config, functions: RewardFunctions, prompts: Iterable[Prompt]
) -> list[RewardItem]:
    """The first row of each function of the user's own. Raises ConfigError: a row has no function."""
    items: dict[str, RewardItem] = {}
    for prompt in prompts:
        if (prompt.agent_loop or cfg.agent.loop) == "environment":
            continue  # which gives the reward itself
        try:
            function = functions.find(prompt.data_source)
        except ConfigError as e:
            raise ConfigError(f"data row {prompt.where}: {e}") from None
        if not function.built_in and function.name not in items:
            given = prompt.text, prompt.ground_truth, prompt.ground_truth, prompt.data_source
            items[function.name] = RewardItem(
                prompt.id, 0, *given, extra_info=prompt.extra, where=prompt.where
            )
    return list(items.values())


def faults_of(cfg: Config, functions: RewardFunctions, items: list[RewardItem]) -> str:
    """Call the functions; returns what is wrong with the first that fails, in one line, or an empty text."""
    answer = tried(cfg.reward, items, cfg.trainer.start_timeout_s)
    before = "called before the start, with the ground truth as the response"
    mend = "mend the function, or set reward.on_error=drop to go on without such samples"
    for error in answer.found:
        if error is not None and error.kind == "reward/timeouts":
            return f"{error} ({before}); raise reward.timeout_s, or mend the function"
        if error is not None:
            return f"{error} ({before}); {mend}"
    if len(answer.found) == len(items):
        return ""
    item = items[len(answer.found)]
    function = functions.find(item.data_source)
    who = f"{function.name}, {item}"
    place = find_user_line(
        answer.output, function.file, deepest_first=True
    )  # of faulthandler's dump
    where = f" at {place}" if place else ""
    if not answer.ready:
        said = (answer.output.strip().splitlines() or ["it says nothing"])[-1][:300]
        return f"{who}: its module cannot be imported in a process of its own: {said}; mend it"
    if answer.code is None or "Timeout (" in answer.output:
        limit = f"did not end within reward.timeout_s={cfg.reward.timeout_s:g} s{where}, nor by its alarm"
        return f"{who}: {limit} ({before}); raise reward.timeout_s, or mend the function"
    ended = (
        f"killed its process (signal {-answer.code})"
        if answer.code < 0
        else f"ended its process (code {answer.code})"
    )
    return f"{who}: {ended}{where} ({before}); {mend}"


def tried(cfg: RewardConfig, items: list[RewardItem], start_s: float) -> Answer:
    """Judge the items one after the other in another process; `start_s`: limit for its start and imports."""
    limit = start_s + len(items) * (cfg.timeout_s + GRACE_S) + SLACK_S
    path = [os.getcwd() if folder == "" else folder for folder in sys.path]
    question = pickle.dumps(path) + pickle.dumps((cfg, items))
    with tempfile.TemporaryFile() as results, tempfile.TemporaryFile() as output:
        # A group of its own: what the function started ends with it, and Ctrl-C is for this process.
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(results.fileno())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[results.fileno()],
            start_new_session=True,
        )
        try:
            child.communicate(question, timeout=limit)
            code = child.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        ready, *found = _read(results) or [False]
        output.seek(0)
        return Answer(bool(ready), found, code, output.read().decode("utf-8", "replace"))


def _end(child: subprocess.Popen) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # nothing is left of it
        pass
    child.wait()


def _read(results: Any) -> list[Any]:
    """The whole objects of a file; the last may be cut off by the death of the process."""
    results.seek(0)
    found = []
    while True:
        try:
            found.append(pickle.load(results))
        except (EOFError, pickle.UnpicklingError):
            return found


def answer() -> None:
    """The other process: judge what stdin holds, and write what was found, one after the other."""
    cfg, items = pickle.load(sys.stdin.buffer)
    scorer = Scorer(cfg)
    with open(int(sys.argv[1]), "wb", buffering=0) as results:
        results.write(pickle.dumps(True))
        for item in items:
            (score,) = scorer.score_batch([item])
            results.write(pickle.dumps(score if isinstance(score, RewardError) else None))
    os._exit(0)  # threads of the function's may not end
