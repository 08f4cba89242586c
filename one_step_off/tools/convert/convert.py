"""`one-step-off convert SCRIPT`: a script of verl or TRL as a config of this program.

Most keys are translated by the tables of `config/other_keys.yaml`. `convert_verl.py` and
`convert_trl.py` translate those whose values have another unit or stand for several keys. What the
other trainer does by default and this one does not is written out too.
"""

import os
import re
import sys
from typing import Any

import yaml

from one_step_off.algorithms.config_checks import LOSSES_WITH_DUAL_CLIP
from one_step_off.config.errors import ConfigError, noting_what_is_missing
from one_step_off.config.loading import KEYS, SECTIONS, load_config_text
from one_step_off.config.text import format_value
from one_step_off.config.unknown_keys import (
    Row,
    engine_argument,
    hint,
    markdown_to_text,
    rows_of_key,
)
from one_step_off.runtime.validation import validate
from one_step_off.tools.convert.conversion import (
    SAME,
    Conversion,
    NotTranslated,
    is_written,
    plain,
    variables_of,
)
from one_step_off.tools.convert.convert_trl import TRL_DEFAULTS, TRL_STEPS
from one_step_off.tools.convert.convert_verl import ASYNC_DEFAULTS, VERL_DEFAULTS, VERL_STEPS
from one_step_off.tools.convert.other_scripts import VERL, Setting, read_script

USAGE = """usage: one-step-off convert SCRIPT   (or: python -m one_step_off.convert SCRIPT)
  SCRIPT   a shell script of verl (python -m verl.trainer.main_ppo key=value ...), a command or a
           Python script of TRL (GRPOConfig(...), --learning_rate 1e-6), or a YAML file of either
Prints the config as YAML, and as comments what it could not translate."""

MISSING: dict[str, Any] = {"model.path": "MODEL", "data.train_files": "TRAIN_FILES"}
"""What a run needs and a script may lack, with what stands for it."""


def convert(path: str) -> Conversion:
    """The config of a script. Raises ConfigError: it cannot be read, or holds no settings."""
    script = read_script(path)
    conversion = Conversion(script, notes=list(script.notes))
    for setting in script.settings:
        before = conversion.given.get(setting.key, setting.value)
        if before != setting.value:
            conversion.notes.append(
                f"{setting.key}={format_value(before)}: set again later; the last value counts"
            )
        conversion.given[setting.key] = setting.value
    steps = VERL_STEPS if script.trainer == VERL else TRL_STEPS
    for step in steps:
        step(conversion)
    for key, value in conversion.given.items():
        if conversion.is_open(key):
            try:
                _translate(conversion, Setting(key, value))
            except NotTranslated as error:
                conversion.leave(key, str(error))
    defaults = TRL_DEFAULTS
    if script.trainer == VERL:
        defaults = ASYNC_DEFAULTS if script.is_async else VERL_DEFAULTS
    conversion.ours = defaults | conversion.ours
    _fit(conversion)
    conversion.settle()
    return conversion


def _translate(conversion: Conversion, setting: Setting) -> None:
    """Translate one setting by the tables. Raises NotTranslated."""
    key, value = setting.key, setting.value
    found = rows_of_key(conversion.script.trainer, key, value)
    if engine_argument(key) and not (found and "engine_kwargs" not in found[0].here):
        conversion.require(f"rollout.engine_kwargs.{engine_argument(key)}", value, key)
    elif found:
        _translate_by_row(conversion, found[0], key, value)
    elif key in KEYS:
        conversion.require(key, value, key)
    else:
        _, advice = hint(key, value, KEYS, SECTIONS)
        is_nothing = advice == "remove it" or advice.startswith("use model, data")
        raise NotTranslated("no such setting here" if is_nothing else advice)


def _translate_by_row(conversion: Conversion, row: Row, key: str, value: Any) -> None:
    codes = re.findall(r"`([a-z_]+\.[a-z_0-9.]+)(?:=([^`]*))?`", row.here)
    wanted = dict(row.keys).get(key)
    if row.here.startswith("the same") and key in KEYS:
        conversion.require(key, value, key)
    elif codes and row.here.startswith("`") and wanted is not None:
        for name, text in codes:
            if text:
                conversion.require(name, yaml.safe_load(text), key)
    elif codes and row.here.startswith("`") and not codes[0][1]:
        conversion.require(codes[0][0], value, key)
    else:
        page = ""
        raise NotTranslated(markdown_to_text(row.here, page).removeprefix("no key: "))


def _fit(c: Conversion) -> None:
    """What the keys need of one another: roles of the objective, and values that are missing."""
    ours = c.ours
    _fit_roles(c)
    if ours.get("algorithm.policy_loss", "vanilla") not in LOSSES_WITH_DUAL_CLIP:
        ours.pop("algorithm.clip_ratio_c", None)
        for key in c.sources.pop("algorithm.clip_ratio_c", []):
            c.leave(key, f"{ours['algorithm.policy_loss']} has no dual clip")
    ours.setdefault("placement.device", "cuda")
    batch, mini_batch = ours.get("data.train_batch_size"), ours.get("actor.ppo_mini_batch_size")
    if batch and mini_batch and mini_batch > batch:
        ours["actor.ppo_mini_batch_size"] = batch
        c.note(
            f"actor.ppo_mini_batch_size={batch}: {mini_batch} is more than a whole batch",
            *c.sources.get("actor.ppo_mini_batch_size", []),
        )
    per_node = min(gpus for sizes in ours["placement.pools"].values() for gpus in sizes)
    if ours.get("rollout.tensor_parallel_size", 1) > per_node:
        c.notes.append("rollout.tensor_parallel_size: lower it, or raise the pool of the rollout")
    for key, placeholder in MISSING.items():
        if not ours.get(key):
            ours[key] = placeholder
            c.notes.append(f"{key}: the script does not say; put yours in place of {placeholder}")


def _fit_roles(c: Conversion) -> None:
    """The roles that the objective needs, in the pool of the actor."""
    ours = c.ours
    actor_pool = "all" if "all" in ours["placement.pools"] else "actor"
    roles = dict(ours.get("placement.roles") or {"rollout": "rollout", "actor": "actor"})
    if ours.get("algorithm.kl_coef"):
        roles["ref"] = actor_pool
    if ours.get("algorithm.adv_estimator") == "gae":
        roles["critic"] = actor_pool
        if c.script.trainer == VERL:
            ours.setdefault("critic.activation_checkpointing", True)  # its default
    if ours.get("reward_model.path"):
        roles["reward_model"] = actor_pool
    ours["placement.roles"] = roles


def config_text(c: Conversion) -> str:
    """The config as YAML."""
    tree: dict[str, dict[str, Any]] = {}
    order = {key: i for i, key in enumerate(KEYS)}
    for dotted in sorted(c.ours, key=lambda key: order[".".join(key.split(".")[:2])]):
        section, name, *inner = dotted.split(".")
        value = plain(c.ours[dotted])
        if inner:
            tree.setdefault(section, {}).setdefault(name, {})[".".join(inner)] = value
        elif is_written(dotted, c.ours):
            tree.setdefault(section, {})[name] = value
    return yaml.dump(tree, None, _Dumper, sort_keys=False, width=10**6)


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, True)
)


def faults_of(text: str) -> list[str]:
    """What is wrong with a converted config, as the program's own checks say it. Environment
    variables that are not set stand for themselves."""
    text = re.sub(
        r"\$\{oc\.env:(\w+)\}", lambda m: m[0] if m[1] in os.environ else f"${m[1]}", text
    )
    try:
        cfg = load_config_text(text)
        with noting_what_is_missing() as missing:
            validate(cfg, machine=False)
    except ConfigError as error:
        return [str(error)]
    return missing


def main(argv: list[str]) -> int:
    """Run the command with these arguments; returns its exit code. Raises ConfigError."""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        asks_for_help = argv[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asks_for_help else sys.stderr)
        return 0 if asks_for_help else 2
    conversion = convert(argv[0])
    text = config_text(conversion)
    trainer = conversion.script.trainer
    page = "from_verl" if trainer == VERL else "from_trl"
    print(f"# {argv[0]}, a script of {trainer}; see docs/reference/{page}.md")
    print(text, end="")
    given = conversion.given
    left = [f"{key}={format_value(given[key])}: {why}" for key, why in conversion.left.items()]
    same = [key for key in given if conversion.outcome_of(key) == SAME]
    variables = dict.fromkeys(name for value in conversion.ours.values()
                              for name in variables_of(value))  # fmt: skip
    notes = list(conversion.notes)
    if variables:
        notes.append(f"{', '.join(variables)}: no value in the script; set it in the environment")
    lists = (
        ("not translated", left),
        ("so here by default, or without effect on training", [", ".join(same)] if same else []),
        ("look at", notes),
        ("to do before it runs here", faults_of(text)),
    )
    for title, lines in lists:
        if lines:
            print(f"\n# {title}:")
            for line in lines:
                print(f"#   {' '.join(line.split())}")
    return 0
