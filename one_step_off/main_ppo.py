"""The command line: python -m one_step_off.main_ppo config=FILE [section.key=value ...] [FLAGS]

`--profile STEP` stands for trainer.profile_step=STEP. `--replay OUTPUT_DIR/skipped/step_NNNNNN`
repeats an update that a run skipped; see `tools/replay.py`."""

import sys
from dataclasses import dataclass

from one_step_off.config.command_line import exit_code
from one_step_off.config.console_streams import never_wait
from one_step_off.config.errors import noting_what_is_missing
from one_step_off.config.help import USAGE, help_text
from one_step_off.config.loading import load_config
from one_step_off.config.placement import placement_text
from one_step_off.config.schema import Config
from one_step_off.config.text import mask_secrets
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.runtime.failure_report import EXIT_FAILED, failure_reported
from one_step_off.runtime.run_folder import locked, replaced_by
from one_step_off.runtime.validation import missing_hardware, validate


@dataclass(frozen=True)
class Arguments:
    """The command line, taken apart: `settings` go to `load_config`; `replay_folder` None: a run,
    not a replay."""

    settings: list[str]
    dry_run: bool
    replay_folder: str | None
    check: bool = False


def main(argv: list[str]) -> int:
    """Run the program with these arguments; returns its exit code."""
    return exit_code(_main, argv)


def console_script() -> int:
    """The entry point of the command `one-step-off`: a run, `one-step-off convert SCRIPT`, or
    `one-step-off scale RUN_FOLDER rollout=+2`."""
    return main(sys.argv[1:])


def parse(argv: list[str]) -> Arguments:
    """Take the command line apart. The value of a flag that has none is reported by `load_config`
    or `replay`."""
    settings = []
    replay_folder = None
    dry_run = False
    check = False
    remaining = iter(argv)
    for argument in remaining:
        if argument == "--dry-run":
            dry_run = True
        elif argument == "--check":
            check = True
        elif argument == "--profile":
            step = next(remaining, "missing")
            settings.append(f"trainer.profile_step={step}")
        elif argument == "--replay":
            replay_folder = next(remaining, "")
        else:
            settings.append(argument)
    return Arguments(settings, dry_run, replay_folder, check)


def _main(argv: list[str]) -> int:
    if not argv:
        print(USAGE, file=sys.stderr)
        return 2
    if argv[0] == "convert":
        from one_step_off.tools.convert.convert import main as convert

        return convert(argv[1:])
    if argv[0] == "scale":
        from one_step_off.tools.scale import main as scale

        return scale(argv[1:])
    if "--help" in argv or "-h" in argv:
        print(help_text(), end="", flush=True)
        return 0
    arguments = parse(argv)
    if not arguments.dry_run:
        never_wait()
    cfg = load_config(arguments.settings)
    if arguments.check:
        from one_step_off.tools.check import run_checks

        return run_checks(cfg, print_at_once)
    if arguments.dry_run:
        with noting_what_is_missing() as missing:
            validate(cfg, machine=False)
        print_plan(cfg, missing)
        return 0
    validate(cfg)
    with locked(cfg), failure_reported(cfg, prints=True):
        # The slow imports only now: a wrong config, or a folder in use, is refused before them.
        if arguments.replay_folder is not None:
            from one_step_off.tools.replay import replay

            return replay(cfg, arguments.replay_folder)
        from one_step_off.runtime.launch import run

        return run(cfg)
    return EXIT_FAILED


def print_at_once(line: str) -> None:
    """Print a line, also where stdout is a pipe and the program is stopped soon."""
    print(line, flush=True)


def print_plan(cfg: Config, missing: list[str]) -> None:
    """Print the resolved config and the placement, and warn of what would refuse a run here.
    `missing`: of `noting_what_is_missing`."""
    print(resolved_yaml(cfg) + "\n# placement")
    for line in placement_text(cfg).splitlines():
        print(f"# {line}", flush=True)
    # Another machine or another folder would help, so these are no faults of the config.
    for fault in (*missing, missing_hardware(cfg), replaced_by(cfg)):
        if fault:
            print(mask_secrets(f"warning: here a run would be refused: {fault}"), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
