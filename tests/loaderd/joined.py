"""`loaderd` in a control group: `python -m tests.loaderd.joined FILE serve ...`.

FILE takes the pids of the group's processes.
"""

import os
import sys
from pathlib import Path

from loaderd import __main__

if __name__ == "__main__":
    Path(sys.argv.pop(1)).write_text(str(os.getpid()))
    __main__.main()
