"""The command with the broken checks: python -m tests.unit.tools.gpu_check.command ARGUMENTS"""

import sys

from one_step_off.tools.gpu_check.command import main
from tests.unit.tools.gpu_check.broken_checks import CHECKS

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CHECKS))
