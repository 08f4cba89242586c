"""The command `python -m one_step_off.gpu_check`; its program is `tools/gpu_check/command.py`."""

import sys

from one_step_off.tools.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
