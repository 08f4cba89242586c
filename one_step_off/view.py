"""The command `python -m one_step_off.view`; the program is `one_step_off/monitoring/view.py`."""

import sys

from one_step_off.monitoring.view import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
