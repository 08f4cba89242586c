"""Supervised fine-tuning: python -m one_step_off.main_sft config=FILE [section.key=value ...]

It takes a config of `main_ppo` and trains the actor on answers. The result, OUTPUT_DIR/hf_model, is
a model.path for RL."""

import sys

from one_step_off.config.command_line import exit_code
from one_step_off.config.console_streams import never_wait
from one_step_off.config.errors import ConfigError, noting_what_is_missing
from one_step_off.config.help import SUPERVISED_USAGE, supervised_help_text
from one_step_off.config.loading import load_config
from one_step_off.config.supervised import unread_lr_warning
from one_step_off.main_ppo import parse, print_at_once, print_plan
from one_step_off.runtime.failure_report import EXIT_FAILED, failure_reported
from one_step_off.runtime.run_folder import locked
from one_step_off.runtime.validation import validate_supervised


def main(argv: list[str]) -> int:
    """Run the program with these arguments; returns its exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    if not argv:
        print(SUPERVISED_USAGE, file=sys.stderr)
        return 2
    if "--help" in argv or "-h" in argv:
        print(supervised_help_text(), end="", flush=True)
        return 0
    arguments = parse(argv)
    if arguments.replay_folder is not None:
        raise ConfigError("--replay: repeats updates of RL; run one_step_off.main_ppo with it")
    if not arguments.dry_run:
        never_wait()
    cfg = load_config(arguments.settings)
    if arguments.check:
        from one_step_off.tools.check import run_supervised_checks

        return run_supervised_checks(cfg, print_at_once)
    if arguments.dry_run:
        with noting_what_is_missing() as missing:
            supervised = validate_supervised(cfg, machine=False)
        print_plan(supervised, missing)
        return 0
    supervised = validate_supervised(cfg)
    warning = unread_lr_warning(cfg)
    if warning:
        print(warning, flush=True)
    with locked(supervised), failure_reported(supervised, prints=True):
        # The slow imports only now: a wrong config, or a folder in use, is refused before them.
        from one_step_off.runtime.launch import run_supervised

        return run_supervised(supervised)
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
