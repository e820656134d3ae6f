"""Directories as tar: what is packed comes out again, and what a hostile archive wants does not happen."""

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import List, Tuple

import pytest

import carrel
from carrel._archive import PIECE, Packing, unpack


def archive(*members: Tuple[str, bytes, str]) -> io.BytesIO:
    """Of (name, type, contents or link)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind, what in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.mode = 0o6755
            if kind == tarfile.REGTYPE:
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what.encode()))
            else:
                member.linkname = what
                tar.addfile(member)
    file.seek(0)
    return file


def tree(root: Path) -> List[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_there_and_back(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep" / ("d" * 120)).mkdir(parents=True)
    (source / "deep" / ("d" * 120) / ("f" * 120)).write_text("long names")
    (source / "empty").write_bytes(b"")
    (source / "large").write_bytes(os.urandom(3 * PIECE + 17))
    (source / "grüße").write_text("x")
    (source / "tool").write_text("#!/bin/sh\n")
    (source / "tool").chmod(0o755)
    (source / "link").symlink_to("deep")
    os.mkfifo(source / "fifo")
    odd = os.fsdecode(b"odd\xff")
    (source / odd).write_text("y")
    packing = Packing(source)
    done = unpack(io.BytesIO(b"".join(packing)), target)
    assert [one.path for one in packing.left_out] == ["fifo"]
    assert tree(target) == [name for name in tree(source) if name != "fifo"]
    assert (done.files, done.directories, done.links, done.left_out) == (6, 2, 1, [])
    assert (target / "large").read_bytes() == (source / "large").read_bytes()
    assert stat.S_IMODE((target / "tool").stat().st_mode) == 0o755
    assert os.readlink(target / "link") == "deep"
    # A second time over it: replaced, and nothing is lost.
    assert unpack(io.BytesIO(b"".join(packing)), target).files == 6


def test_pieces_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(5 * PIECE))
    assert max(len(piece) for piece in Packing(tmp_path)) <= 2 * PIECE


def test_packing_what_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(carrel.InvalidArgument):
        Packing(tmp_path / "missing")


HOSTILE = [
    [("../out", tarfile.REGTYPE, "x")],
    [("a/../../out", tarfile.REGTYPE, "x")],
    [("/out", tarfile.REGTYPE, "x")],
    [("link", tarfile.SYMTYPE, ".."), ("link/out", tarfile.REGTYPE, "x")],
    [("link", tarfile.SYMTYPE, "/"), ("link/out", tarfile.REGTYPE, "x")],
    [("out", tarfile.SYMTYPE, "../out")],
    [("out", tarfile.SYMTYPE, "/etc/passwd")],
    [("a", tarfile.DIRTYPE, ""), ("a/up", tarfile.SYMTYPE, ".."), ("b", tarfile.SYMTYPE, "a/up/..")],
    [("hard", tarfile.LNKTYPE, "../secret"), ("hard", tarfile.LNKTYPE, "/etc/passwd")],
    [("device", tarfile.CHRTYPE, ""), ("pipe", tarfile.FIFOTYPE, "")],
    [("..", tarfile.DIRTYPE, "")],
    [("file", tarfile.REGTYPE, "x"), ("file/below", tarfile.REGTYPE, "x")],
]


@pytest.mark.parametrize("members", HOSTILE)
def test_nothing_lands_outside(tmp_path: Path, members: List[Tuple[str, bytes, str]]) -> None:
    (tmp_path / "secret").write_text("secret")
    target = tmp_path / "target"
    done = unpack(archive(*members, ("good", tarfile.REGTYPE, "g")), target)
    assert sorted(os.listdir(tmp_path)) == ["secret", "target"]
    assert done.left_out
    assert done.left_out_count == len(done.left_out)
    assert (target / "good").read_text() == "g"
    for path in target.rglob("*"):
        assert os.path.realpath(path).startswith(str(target)), path


def test_a_link_that_was_there_is_not_written_through(tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    target.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (target / "directory").symlink_to(elsewhere)
    (target / "file").symlink_to(elsewhere / "file")
    done = unpack(archive(("directory/x", tarfile.REGTYPE, "x"), ("file", tarfile.REGTYPE, "new")), target)
    assert os.listdir(elsewhere) == ["file"]
    assert (elsewhere / "file").read_text() == "mine"
    assert (target / "file").read_text() == "new"
    assert [one.path for one in done.left_out] == ["directory/x"]


def test_no_special_bits(tmp_path: Path) -> None:
    unpack(archive(("tool", tarfile.REGTYPE, "x")), tmp_path)
    assert stat.S_IMODE((tmp_path / "tool").stat().st_mode) == 0o755


def test_a_directory_that_forbids_writing_is_filled_first(tmp_path: Path) -> None:
    file = archive(("d", tarfile.DIRTYPE, ""), ("d/f", tarfile.REGTYPE, "x"))
    assert unpack(file, tmp_path).files == 1


def test_garbage(tmp_path: Path) -> None:
    with pytest.raises(carrel.ProtocolError):
        unpack(io.BytesIO(b"x" * 4096), tmp_path / "t")


def test_a_tar_that_was_cut(tmp_path: Path) -> None:
    whole = archive(("file", tarfile.REGTYPE, "x" * 2000)).getvalue()
    with pytest.raises(carrel.ProtocolError):
        unpack(io.BytesIO(whole[:1500]), tmp_path / "t")
    assert tree(tmp_path / "t") == []
