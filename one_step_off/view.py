"""The command `python -m one_step_off.view`; its program is `tools/view.py`."""

import sys

from one_step_off.config.command_line import exit_code
from one_step_off.tools.view import main

if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
