"""What can go wrong between a daemon and its clients."""


class DaemonError(Exception):
    """Base of everything that the daemon raises, and that a client raises on its behalf."""


class BadMessage(DaemonError):
    """A frame is not a message of this protocol version."""


class Refused(DaemonError, ValueError):
    """The daemon will not serve the request: unknown split, fanout 0, too little memory, ..."""


class Shortage(Refused):
    """Arena slots that a session needs are held by batches in flight, or are not adjacent."""


class ShuttingDown(Refused):
    """The daemon accepts no more sessions; another daemon may take its place."""


class NoDaemon(DaemonError):
    """Nothing answers at the endpoint."""


class EndpointInUse(DaemonError):
    """Another daemon serves this endpoint."""


class SessionLost(DaemonError):
    """The daemon went away, or ended the session."""


class BatchFailed(DaemonError):
    """The daemon could not build a batch: a corrupt block, a failing disk."""
