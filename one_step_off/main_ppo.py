"""The command line: python -m one_step_off.main_ppo config=FILE [section.key=value ...] [--dry-run] [--help]

or, with `--replay OUTPUT_DIR/skipped/step_NNNNNN`, an update of that run that was skipped; see replay.py. `--profile STEP`
stands for trainer.profile_step=STEP."""

import errno
import os
import sys

from one_step_off.config.command_line import exit_code
from one_step_off.config.loading import USAGE, help_text, load_config, placement_text, resolved_yaml
from one_step_off.config.schema import ConfigError
from one_step_off.config.validation import mask_secrets, missing_hardware
from one_step_off.runtime.run_folder import replaced_by
from one_step_off.runtime.validation import validate

# A disk's fault, or a folder's, which the user can mend. Only what fails to write names no file.
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS
NO_ROOM = *FULL, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG
FLAGS = ("--dry-run", "--help", "-h", "--replay", "--profile")


def main(argv: list[str]) -> int:
    """Run the program with these arguments; returns its exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    if not argv:
        print(USAGE, file=sys.stderr)
        return 2
    if {"--help", "-h"} & set(argv):
        print(help_text(), end="", flush=True)
        return 0
    if "--profile" in argv:
        at = argv.index("--profile")
        argv = [
            *argv[:at],
            f"trainer.profile_step={(argv[at + 1 :] or ['missing'])[0]}",
            *argv[at + 2 :],
        ]
    folder = "".join(argv[argv.index("--replay") + 1 :][:1]) if "--replay" in argv else None
    cfg = load_config([a for a in argv if a not in (*FLAGS, folder)])
    dry = "--dry-run" in argv
    validate(cfg, machine=not dry)
    if dry:
        print(resolved_yaml(cfg) + "\n# placement")
        print("\n".join("# " + line for line in placement_text(cfg).splitlines()), flush=True)
        # What another machine or another folder would mend is no fault of the config.
        for line in filter(None, (missing_hardware(cfg), replaced_by(cfg))):
            print(mask_secrets(f"warning: here a run would be refused: {line}"), file=sys.stderr)
        return 0
    # Only now the heavy imports: a wrong config is answered before them.
    from one_step_off.runtime.launch import report_failure, run
    from one_step_off.runtime.replay import replay

    try:
        return run(cfg) if folder is None else replay(cfg, folder)
    except ConfigError:
        raise
    except Exception as e:
        own, at = cfg.trainer.output_dir, e.filename if isinstance(e, OSError) else None
        ends = [
            os.path.realpath(str(path)) for path in (at or own, own)
        ]  # the one in the other, or on the way to it
        if (
            isinstance(e, OSError)
            and os.path.commonpath(ends) in ends
            and e.errno in (NO_ROOM if at else FULL)
        ):
            raise ConfigError(f"{at or own}: {e.strerror}; name another folder") from e
        print(report_failure(cfg, e), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
