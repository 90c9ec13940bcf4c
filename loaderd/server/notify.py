"""What the service manager is told: systemd's notification socket."""

import os
import socket


def notify(*states: str) -> bool:
    """Send states such as "READY=1" to $NOTIFY_SOCKET; False where there is none or it is gone.

    Source: sd_notify(3): one datagram of lines; a leading @ stands for the abstract namespace.
    """
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return False
    address = b"\0" + os.fsencode(name[1:]) if name[0] == "@" else os.fsencode(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            sender.connect(address)
            sender.send("\n".join(states).encode())
        except OSError:
            return False
    return True
