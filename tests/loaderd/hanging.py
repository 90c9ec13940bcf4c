"""`loaderd`, a worker of which hangs at the end: `python -m tests.loaderd.hanging serve ...`."""

import threading

from loaderd import __main__
from loaderd.cli import commands
from loaderd.server import daemon

if __name__ == "__main__":
    daemon.DRAIN_S = 0.1
    commands.StreamService.drain = lambda self: threading.Event().wait()
    __main__.main()
