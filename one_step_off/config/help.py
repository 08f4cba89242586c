"""The text of --help: how to call the program, and every config key."""

import itertools

from one_step_off.config.loading import KEYS, entry_keys
from one_step_off.config.schema import Config
from one_step_off.config.supervised import RL_SECTIONS
from one_step_off.config.text import format_value

_USAGE_LINE = (
    "usage: python -m one_step_off.main_ppo config=FILE [section.key=value ...] "
    "[--check] [--dry-run] [--help] [--profile STEP] [--replay FOLDER]"
)

USAGE = f"""{_USAGE_LINE}
  check a run:       python -m one_step_off.main_ppo config=config/gsm8k_tiny_cpu.yaml --check
  list all keys:     python -m one_step_off.main_ppo --help"""

_DESCRIPTION = """
Trains a language model with one-step-off-policy PPO.

  config=FILE          a YAML file, such as config/gsm8k_tiny_cpu.yaml (trains on a CPU in minutes),
                       or the name of a config of the package, such as gsm8k_tiny_cpu; "config=" may
                       be omitted if the name ends in .yaml or .yml
  --config FILE        means the same
  section.key=value    sets one key, overriding the file; the value is YAML, for example
                       placement.pools.rollout=[2]
  --check              try in seconds what the run would use, and start no engine: the config, your
                       modules, the model's files, all rows, the reward on a few of them, and an
                       episode of each agent loop or external agent against canned answers; a line
                       PASS, WARN or FAIL for each, and exit code 2 if one fails
  --dry-run            check the keys and what must fit together, print the resolved config and the
                       placement, and start nothing; what this machine lacks (files, models,
                       packages, GPUs) is only a warning; nothing inside of a file is read: use
                       --check for models, rows, rewards and agents
  --profile STEP       write a torch profile of the updates of that step (counted from 0) to
                       OUTPUT_DIR/profile
  --replay FOLDER      repeat the update of the batch in FOLDER, such as
                       OUTPUT_DIR/skipped/step_000012, on the trainers alone, to show why it was
                       skipped; the run folder is not changed
  --help               print this text

  one-step-off convert SCRIPT (or: python -m one_step_off.convert SCRIPT) prints a script of verl or
  TRL as a config.

Exit codes: 0 success, 1 the run failed, 2 bad input (one line names it), 130 interrupted.

Keys:"""


SUPERVISED_USAGE = (
    "usage: python -m one_step_off.main_sft config=FILE [section.key=value ...] "
    "[--check] [--dry-run] [--help] [--profile STEP]"
)

_SUPERVISED_DESCRIPTION = """
Fine-tunes a language model on answers (supervised fine-tuning). OUTPUT_DIR/hf_model is a model.path
for RL with one_step_off.main_ppo.

  config=FILE          a YAML file, such as config/sft_tiny_cpu.yaml (trains on a CPU in a minute),
                       or the name of a config of the package; a config for main_ppo will do, if its
                       rows have answers: the actor is trained, and there are no rollouts
  section.key=value    sets one key, overriding the file
  --check              read the model's files and all rows, and name those that cannot be used
  --dry-run            check the keys and what must fit together, print the resolved config and the
                       placement, and start nothing; what this machine lacks is only a warning
  --profile STEP       write a torch profile of that step (counted from 0) to OUTPUT_DIR/profile
  --help               print this text

Exit codes: 0 success, 1 the run failed, 2 bad input (one line names it), 130 interrupted.

Keys (those of other sections are not used):"""


def help_text() -> str:
    """How to call the program, and every key with its type, default and help line."""
    return _text(_USAGE_LINE, _DESCRIPTION, ())


def supervised_help_text() -> str:
    """As `help_text`, for main_sft."""
    return _text(SUPERVISED_USAGE, _SUPERVISED_DESCRIPTION, RL_SECTIONS)


def _text(usage: str, description: str, left_out: tuple[str, ...]) -> str:
    lines = [usage, description]
    for section, keys in itertools.groupby(KEYS.values(), lambda key: key.section):
        if section in left_out:
            continue
        lines.append(f"\n{section}: {getattr(Config(), section).__doc__}")
        for key in keys:
            default = format_value(key.default) or repr("")
            lines.append(f"  {key.dotted}  ({key.type_text}, default {default})")
            lines.append(f"      {key.metadata['help']}")
            for entry in entry_keys(key):
                default = format_value(entry.default) or repr("")
                lines.append(f"        {entry.name}  ({entry.type_text}, default {default})")
                lines.append(f"            {entry.metadata['help']}")
    return "\n".join(lines) + "\n"
