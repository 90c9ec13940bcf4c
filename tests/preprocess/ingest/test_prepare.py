"""What is prepared before an ingest."""

from pathlib import Path

from preprocess.ingest import prepare


def test_folders_above_new_keys_are_on_disk_before_the_store_is_written(tmp_path, monkeypatch):
    """A new name is lost at power failure until the folder that it stands in was synced."""
    flushed: list[Path] = []
    monkeypatch.setattr(prepare, "flush", flushed.append)

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "u.npy").write_bytes(b"ids")

    with prepare.keys_beside(tmp_path / "a" / "b" / "store", write):
        assert flushed == [tmp_path / "a" / "b", tmp_path / "a", tmp_path]
