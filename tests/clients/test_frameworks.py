"""Lightning's and Accelerate's own code over a daemon."""

import warnings

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from clients.torch import NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.clients.fake import fake_daemon  # noqa: E402


@pytest.fixture
def served(tmp_path):
    with fake_daemon(tmp_path, fingerprint="f00d") as running:
        yield running.endpoint


@pytest.fixture
def lightning():
    """The package, whose warnings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("lightning", exc_type=ImportError)


@pytest.fixture
def accelerate():
    """The package, whose warnings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("accelerate", exc_type=ImportError)


def make_model(lightning, seen, stop_after=None):
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 7)

        def training_step(self, batch, index):
            seen.append((batch.epoch, batch.step))
            if len(seen) == stop_after:
                self.trainer.should_stop = True
            return self.layer(batch.x[: batch.batch_size]).square().mean()

        def validation_step(self, batch, index):
            assert batch.batch_size == 8

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Model()


def test_lightning_trains_and_goes_on_mid_epoch(served, lightning, tmp_path):
    from clients.lightning import GraphDataModule

    options = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip

    def fit(seen, path=None, **more):
        module = GraphDataModule(served, (4, 3), 8, splits=("train", "train", "train"))
        trainer = lightning.Trainer(**options, **more)
        trainer.fit(make_model(lightning, seen), datamodule=module, ckpt_path=path)
        return trainer

    seen, rest = [], []
    fit(seen, max_epochs=2)
    assert seen == [(epoch, step) for epoch in range(2) for step in range(5)]
    stopped = []
    fit(stopped, max_steps=3).save_checkpoint(tmp_path / "saved.ckpt", weights_only=False)
    fit(rest, tmp_path / "saved.ckpt", max_epochs=2)
    assert stopped == seen[:3]
    assert rest[:2] == seen[3:5]  # what was left of the epoch


def test_accelerate_leaves_our_loader_alone(served, accelerate):
    pytest.importorskip("torch_geometric")
    from clients.pyg import NeighborLoader

    loader = NeighborLoader(served, [4, 3], "train", 8)
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
    assert len(list(loader)) == 5
    loader.dataset.close()


@pytest.mark.parametrize("dispatch", [False, True])
def test_what_accelerate_would_share_out_twice_is_refused(served, accelerate, dispatch):
    accelerate.PartialState(cpu=True)
    data = NeighborDataset(served, num_neighbors=(4, 3), batch_size=8, rank=0, world_size=2)
    prepared = accelerate.data_loader.prepare_data_loader(
        DataLoader(data, batch_size=None), num_processes=2, process_index=0,
        device=torch.device("cpu"), put_on_device=True, dispatch_batches=dispatch,
    )  # fmt: skip
    with pytest.raises(Refused, match="one of 2 shares already") as caught:
        next(iter(prepared))
    assert "\n" not in str(caught.value)
    assert len(list(DataLoader(data, batch_size=None))) == 5
    data.close()
