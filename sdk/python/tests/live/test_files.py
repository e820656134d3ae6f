"""Files, by the blocking client, through both doors."""

import os
import threading
from pathlib import Path

import pytest

import carrel


def test_read_and_write(sandbox: carrel.Sandbox) -> None:
    entry = sandbox.files.write("deep/er/grüße.txt", "ä\n", mode=0o600)
    assert (entry.kind, entry.size, entry.mode & 0o777) == ("file", 3, 0o600)
    assert sandbox.files.read_text("deep/er/grüße.txt") == "ä\n"
    assert sandbox.files.read("/workspace/deep/er/grüße.txt") == "ä\n".encode()
    sandbox.files.write("deep/er/grüße.txt", b"\xff", append=True)
    assert sandbox.files.read("deep/er/grüße.txt") == b"\xc3\xa4\n\xff"
    assert sandbox.files.read("deep/er/grüße.txt", offset=1, length=2) == b"\xa4\n"
    assert sandbox.files.read("deep/er/grüße.txt", offset=3) == b"\xff"
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == b""
    assert sandbox.run("cat deep/er/grüße.txt | wc -c", env="bash").stdout.strip() == "4"


def test_guards(sandbox: carrel.Sandbox) -> None:
    first = sandbox.files.write("f", "1")
    assert first.etag
    second = sandbox.files.write("f", "2", if_match=first.etag)
    assert sandbox.files.etag("f") == second.etag
    with pytest.raises(carrel.PreconditionFailed):
        sandbox.files.write("f", "3", if_match=first.etag)
    with pytest.raises(carrel.AlreadyExists):
        sandbox.files.write("f", "3", overwrite=False)
    with pytest.raises(carrel.PreconditionFailed):
        sandbox.files.write("f", "3", if_none_match="*")
    assert sandbox.files.read_text("f") == "2"


def test_list_stat_move_delete_mkdir(sandbox: carrel.Sandbox) -> None:
    sandbox.files.mkdir("a/b")
    sandbox.files.write("a/b/c", "x")
    sandbox.files.write("a/d", "y")
    assert [entry.name for entry in sandbox.files.list("a")] == ["b", "d"]
    assert [entry.name for entry in sandbox.files.list("a", depth=2)] == ["b", "b/c", "d"]
    assert sandbox.files.stat("a/b").is_dir
    sandbox.run("ln -s d a/link", env="bash").check()
    assert sandbox.files.stat("a/link").target == "d"
    assert sandbox.files.stat("a/link", follow=True).kind == "file"
    assert sandbox.files.move("a/d", "new/e", parents=True).kind == "file"
    assert sandbox.files.read("new/e") == b"y"
    with pytest.raises(carrel.CarrelError, match="not empty"):
        sandbox.files.delete("a")
    assert sandbox.files.delete("a", recursive=True) == 4
    with pytest.raises(carrel.NotFound):
        sandbox.files.stat("a")


def test_a_long_list_comes_whole(sandbox: carrel.Sandbox) -> None:
    sandbox.run("mkdir many; cd many; touch {1..2500}", env="bash").check()
    assert len(sandbox.files.list("many")) == 2500


def test_search_and_replace(sandbox: carrel.Sandbox) -> None:
    sandbox.files.write("a.py", "x = 1\ny = 2\n")
    sandbox.files.write("b.txt", "X = 1\n")
    found = sandbox.files.search("x = 1")
    assert [(match.path, match.line) for match in found.matches] == [("a.py", 1)]
    assert found.complete
    assert len(sandbox.files.search("x = \\d", regex=True, ignore_case=True).matches) == 2
    assert [match.path for match in sandbox.files.search(glob="*.txt").matches] == ["b.txt"]
    assert sandbox.files.replace("a.py", "= 2", "= 3", expect=1).files == {"a.py": 1}
    assert sandbox.files.read_text("a.py") == "x = 1\ny = 3\n"
    with pytest.raises(carrel.CarrelError):
        sandbox.files.replace("a.py", "=", "!", expect=1)


def test_paths_that_lead_out(sandbox: carrel.Sandbox) -> None:
    for path in ("../x", "/etc/passwd"):
        with pytest.raises(carrel.InvalidArgument) as caught:
            sandbox.files.read(path)
        assert caught.value.code == "path_outside"


def test_a_file_up_and_down(sandbox: carrel.Sandbox, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "data.bin").write_bytes(content)
    (tmp_path / "data.bin").chmod(0o750)
    assert sandbox.files.upload(tmp_path / "data.bin").bytes == len(content)
    assert sandbox.files.stat("data.bin").mode & 0o777 == 0o750
    sandbox.files.upload(tmp_path / "data.bin", "in/")
    sandbox.files.upload(tmp_path / "data.bin", "in/other.bin")
    assert [entry.name for entry in sandbox.files.list("in")] == ["data.bin", "other.bin"]
    (tmp_path / "down").mkdir()
    sandbox.files.download("in/other.bin", tmp_path / "down")
    assert (tmp_path / "down" / "other.bin").read_bytes() == content
    sandbox.files.download("data.bin", str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == content
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o750
    with pytest.raises(carrel.NotFound):
        sandbox.files.download("missing", tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_directory_up_and_down(sandbox: carrel.Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    for n in range(50):
        (source / "sub" / f"f{n}").write_bytes(os.urandom(10_000))
    (source / "grüße").write_text("x")
    (source / "link").symlink_to("sub/f1")
    sent = sandbox.files.upload(source, "project")
    assert (sent.files, sent.links, sent.left_out) == (51, 1, [])
    assert sandbox.run("ls project/sub | wc -l", env="bash").stdout.strip() == "51"
    got = sandbox.files.download("project", tmp_path / "copy")
    assert (got.files, got.links, got.left_out) == (51, 1, [])
    for path in source.rglob("*"):
        copy = tmp_path / "copy" / path.relative_to(source)
        assert copy.is_dir() == path.is_dir()
        assert copy.is_symlink() == path.is_symlink()
        if path.is_file():
            assert copy.read_bytes() == path.read_bytes()


def test_a_sandbox_that_wants_out_does_not_get_out(sandbox: carrel.Sandbox, tmp_path: Path) -> None:
    sandbox.run("mkdir evil; cd evil; ln -s /etc abs; ln -s ../../../.. up; echo fine > file", env="bash").check()
    sandbox.files.download("evil", tmp_path / "target")
    for path in (tmp_path / "target").rglob("*"):
        assert os.path.realpath(path).startswith(str(tmp_path / "target"))
    assert (tmp_path / "target" / "file").read_text() == "fine\n"


def test_watch(sandbox: carrel.Sandbox) -> None:
    sandbox.files.mkdir("watched")
    with sandbox.files.watch("watched") as changes:
        writer = threading.Thread(target=sandbox.files.write, args=("watched/new", "x"))
        writer.start()
        change = next(change for change in changes if change.path.endswith("new"))
        writer.join()
    assert change.kind in ("created", "changed")
