"""A trainer without end, in a process of its own: `python -m tests.loaderd.trainer ENDPOINT STEPS`.

STEPS are those of an epoch of batches of 50.  It says "going" when it has the third of them.
"""

import sys

from loaderd.api.endpoint import parse_endpoint
from loaderd.api.protocol import Release, Start
from tests.loaderd.harness import Client


def train(endpoint: str, steps: int) -> None:
    """Read epoch after epoch."""
    client = Client(parse_endpoint(endpoint))
    session = client.attach(num_neighbors=(5, 5), batch_size=50, window=4).session
    epoch = 0
    while True:
        client.send(Start(session=session, run=epoch + 1, epoch=epoch, step=0))
        for step in range(steps):
            assert client.receive().step == step
            if step == 2 and epoch == 0:
                sys.stdout.write("going\n")
                sys.stdout.flush()
            client.send(Release(session=session, run=epoch + 1, step=step, group=0))
        epoch += 1


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
