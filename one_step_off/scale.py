"""The command `python -m one_step_off.scale`; its program is `tools/scale.py`."""

import sys

from one_step_off.config.command_line import exit_code
from one_step_off.tools.scale import main

if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
