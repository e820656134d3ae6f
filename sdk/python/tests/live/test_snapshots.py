"""Snapshots, forks and files of them, by the blocking client."""

from pathlib import Path

import pytest

import carrel


def test_taken_listed_compared_restored_and_removed(client: carrel.Carrel) -> None:
    with client.sandbox() as sandbox:
        sandbox.files.write("file", "old")
        taken = sandbox.snapshot(tags=["good"], files_only=True)
        assert (taken.sandbox, taken.tags, taken.memory) == (sandbox.id, ["good"], False)
        assert [one.id for one in client.snapshots.list(tag="good")] == [taken.id]
        assert client.snapshots.get("good").id == taken.id
        sandbox.files.write("file", "new")
        sandbox.files.write("more", "")
        diff = client.snapshots.diff("good")
        assert ([one.path for one in diff.added.files], diff.changed.count, diff.removed.count) == (["more"], 1, 0)
        with client.snapshots.restore("good", new=True) as restored:
            assert restored.files.read("file") == b"old"
        client.snapshots.delete(taken.id)
        with pytest.raises(carrel.CarrelError) as caught:
            client.snapshots.get(taken.id)
        assert caught.value.code == "snapshot_not_found"


def test_forks_go_their_own_ways(client: carrel.Carrel) -> None:
    with client.sandbox("forked") as sandbox:
        sandbox.run("x = 1").check()
        sandbox.files.write("file", "same")
        (fork,) = sandbox.fork()
        with fork:
            assert fork.cost is not None
            assert fork.cost.disk_bytes > 0
            fork.files.write("file", "other")
            assert (sandbox.files.read("file"), fork.files.read("file")) == (b"same", b"other")
            key = sandbox.key
            assert fork.adopt().key == key
            assert sandbox.refresh().key != key


def test_as_a_file(client: carrel.Carrel, tmp_path: Path) -> None:
    with client.sandbox() as sandbox:
        sandbox.files.write("file", "kept")
        taken = sandbox.snapshot(files_only=True)
        local = tmp_path / "work.carrel"
        size = client.snapshots.export(taken.id, local)
        assert (local.stat().st_size, local.stat().st_mode & 0o777) == (size, 0o600)
        imported = client.snapshots.import_(local)
        assert imported.id != taken.id
        with client.snapshots.restore(imported.id, new=True) as restored:
            assert restored.files.read("file") == b"kept"
        local.write_bytes(local.read_bytes()[: size // 2])
        with pytest.raises(carrel.InvalidArgument):
            client.snapshots.import_(local)
        with pytest.raises(carrel.CarrelError):
            client.snapshots.export("snp_none", local)
        # What was there stays, and nothing lies beside it.
        assert (local.stat().st_size, len(list(tmp_path.iterdir()))) == (size // 2, 1)
        for one in (taken.id, imported.id):
            client.snapshots.delete(one)
