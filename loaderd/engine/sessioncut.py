"""How much of each a session gets: workspaces, transit slots, slots for batches."""

from loaderd.memory.ledger import MAX_TRANSIT, EngineSettings, SessionNeed

_ROOMY = 512  # slots: sessions of hyperbatches have a cache then


class SessionCut:
    """How much of each a session gets: physical, so it may follow the budget."""

    def __init__(self, workers: int, transit: int, quota: int, window: int) -> None:
        """Workspaces; transit slots of each; slots for batches; batches in flight."""
        self.workers, self.transit, self.quota, self.window = workers, transit, quota, window

    def slots(self, need: SessionNeed) -> int:
        """All of a session's."""
        return self.workers * (need.workspace + self.transit) + need.seeds + self.quota


def cut_session(
    need: SessionNeed, available: int, row_blocks: int, settings: EngineSettings, window: int
) -> SessionCut:
    """Share `available` slots between a session and the row pool.  `need.least` fits."""
    window = window or 2 * settings.workers
    batch = need.structure + need.addresses
    room = available - need.seeds - need.least_quota
    workers = max(1, min(settings.workers, room // 2 // (need.workspace + 2)))
    room -= workers * (need.workspace + 2)
    if room >= row_blocks + (window - 1) * batch:  # all rows stay: nothing passes through
        return SessionCut(workers, 2, need.least_quota + (window - 1) * batch, window)
    transit = 2 + max(0, min(MAX_TRANSIT - 2, room // 4 // workers))
    room -= workers * (transit - 2)
    wanted = window * (batch + need.area) - need.least_quota
    quota = need.least_quota + max(0, min(wanted, room // 2))
    return SessionCut(workers, transit, quota, window)


def cut_workspaces(
    need: SessionNeed, available: int, settings: EngineSettings, window: int
) -> SessionCut:
    """The same for hyperbatches, which begin with one workspace.  `need.least` fits."""
    # blocks pass through where there is no room for a cache
    spare = available - need.workspace - need.seeds - need.least_quota
    transit = 2 if available > _ROOMY else max(2, min(MAX_TRANSIT // 2, spare // 8))
    return SessionCut(1, transit, need.least_quota, window or 2 * settings.workers)
