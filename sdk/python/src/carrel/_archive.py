"""Whole directories as tar: packed piece by piece, unpacked so that nothing lands outside the target.

What comes out of a sandbox was written by code that nobody trusts. Unpacking therefore takes only files, directories and
symbolic links, never writes through a link (neither one of the archive nor one that was there), makes links last, and
keeps only those that lead to somewhere inside. Everything else is left out, and said.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Iterator, List, Tuple

from ._errors import InvalidArgument, ProtocolError
from ._models import LeftOut, Transferred

# Large enough that a thread's round trip per piece costs nothing, small enough to hold several.
PIECE = 256 * 1024
# Named of what was left out; the count goes on.
MAX_NAMED = 100


class Packing:
    """The pieces of a tar file of a directory's contents; `left_out` is complete once it was iterated."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise InvalidArgument(f"not a directory: {directory}")
        self._directory = directory
        self.left_out: List[LeftOut] = []

    def __iter__(self) -> Iterator[bytes]:
        self.left_out.clear()
        pending = bytearray()
        for path, name in _walk(self._directory):
            info = os.lstat(path)
            if stat.S_ISREG(info.st_mode):
                # Opened before its header is written: what cannot be read is an error before half of it is sent.
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    pending += _header(name, tarfile.REGTYPE, info, size=size)
                    left = size
                    while left:
                        piece = file.read(min(left, PIECE))
                        if not piece:
                            raise OSError(f"{path} became shorter while it was uploaded")
                        left -= len(piece)
                        pending += piece
                        if len(pending) >= PIECE:
                            yield bytes(pending)
                            pending.clear()
                pending += bytes(-size % tarfile.BLOCKSIZE)
            elif stat.S_ISDIR(info.st_mode):
                pending += _header(name + "/", tarfile.DIRTYPE, info)
            elif stat.S_ISLNK(info.st_mode):
                pending += _header(name, tarfile.SYMTYPE, info, link=os.readlink(path))
            else:
                self.left_out.append(LeftOut(name, "neither a file, a directory nor a symbolic link"))
            if len(pending) >= PIECE:
                yield bytes(pending)
                pending.clear()
        pending += bytes(2 * tarfile.BLOCKSIZE)
        yield bytes(pending)

    def done(self, reply: Transferred) -> Transferred:
        """The daemon's account with what was never sent."""
        return Transferred(
            files=reply.files,
            directories=reply.directories,
            links=reply.links,
            bytes=reply.bytes,
            left_out=[*self.left_out, *reply.left_out],
            left_out_count=len(self.left_out) + reply.left_out_count,
        )


def _walk(directory: Path) -> Iterator[Tuple[str, str]]:
    """Paths and names below the directory, parents first, in the order of their names."""
    todo: List[Tuple[str, str]] = [(str(directory), "")]
    while todo:
        path, name = todo.pop()
        if name:
            yield path, name
        if os.path.isdir(path) and (not name or not os.path.islink(path)):
            below = sorted(os.listdir(path), reverse=True)
            todo += [(os.path.join(path, one), f"{name}/{one}" if name else one) for one in below]


def _header(name: str, kind: bytes, info: os.stat_result, size: int = 0, link: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.size = size
    member.linkname = link
    member.mode = info.st_mode & 0o777
    member.mtime = int(info.st_mtime)
    # Whose it was here means nothing there.
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def read_pieces(file: IO[bytes]) -> Iterator[bytes]:
    while True:
        piece = file.read(PIECE)
        if not piece:
            return
        yield piece


def open_binary(path: Path) -> IO[bytes]:
    return open(path, "rb")


def spool() -> IO[bytes]:
    """A file without a name, for an archive on its way."""
    return tempfile.TemporaryFile()


class Rewound:
    """A file's contents, from the start each time they are asked for."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        return read_pieces(self._file)


def beside(target: Path) -> Tuple[int, str]:
    """A new file in the directory of `target`, to be moved into its place: descriptor and path."""
    return tempfile.mkstemp(dir=target.parent, prefix=".carrel-")


def unpack(archive: IO[bytes], target: Path) -> Transferred:
    """Unpacks a tar file below `target`, which is made if need be."""
    target.mkdir(parents=True, exist_ok=True)
    return _Unpacking(target).run(archive)


class _Unpacking:
    def __init__(self, target: Path) -> None:
        # Real once: from here on no component is resolved through a link.
        self._root = Path(os.path.realpath(target))
        self._files = self._directories = self._bytes = 0
        self._links: List[Tuple[Path, str, str]] = []
        self._modes: List[Tuple[Path, int]] = []
        self._left_out: List[LeftOut] = []
        self._left_out_count = 0

    def run(self, archive: IO[bytes]) -> Transferred:
        try:
            with tarfile.open(fileobj=archive, mode="r:", errors="surrogateescape") as tar:
                for member in tar:
                    self._member(tar, member)
        except tarfile.TarError as error:
            raise ProtocolError(f"not a tar file: {error}") from error
        links = sum(self._link(*link) for link in self._links)
        links -= self._drop_escaping()
        # Last, so that a directory without write permission could still be filled.
        for path, mode in reversed(self._modes):
            os.chmod(path, mode)
        return Transferred(self._files, self._directories, links, self._bytes, self._left_out, self._left_out_count)

    def _leave_out(self, name: str, why: str) -> None:
        self._left_out_count += 1
        if len(self._left_out) < MAX_NAMED:
            self._left_out.append(LeftOut(name, why))

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if member.name.startswith("/") or not _plain(parts):
            return self._leave_out(member.name, "leads out of the target directory")
        if not (member.isreg() or member.isdir() or member.issym()):
            return self._leave_out(member.name, "neither a file, a directory nor a symbolic link")
        if not parts:
            return None
        parent = self._parent(parts[:-1])
        path = self._root.joinpath(*parts)
        if parent is None or (member.isdir() and not _make_directory(path)):
            return self._leave_out(member.name, "something that is not a directory is in the way")
        if member.isdir():
            self._directories += 1
            self._modes.append((path, (member.mode & 0o777) | stat.S_IRWXU))
        elif member.issym():
            self._links.append((path, member.linkname, member.name))
        elif path.is_dir() and not path.is_symlink():
            self._leave_out(member.name, "a directory is in the way")
        else:
            self._write(tar, member, path)
        return None

    def _parent(self, parts: List[str]) -> object:
        path = self._root
        for part in parts:
            path = path / part
            if not _make_directory(path):
                return None
        return path

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        source = tar.extractfile(member)
        if source is None:
            return self._leave_out(member.name, "has no contents")
        # Beside it and then in its place: a link of that name is replaced, not followed.
        handle, temporary = beside(path)
        try:
            with os.fdopen(handle, "wb") as file:
                for piece in read_pieces(source):
                    file.write(piece)
                    self._bytes += len(piece)
            os.chmod(temporary, member.mode & 0o777)
            os.utime(temporary, (member.mtime, member.mtime))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        self._files += 1
        return None

    def _link(self, path: Path, target: str, name: str) -> bool:
        if os.path.isabs(target):
            self._leave_out(name, "a link that leads out of the target directory")
            return False
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            self._leave_out(name, "something is in the way")
            return False
        os.symlink(target, path)
        return True

    def _drop_escaping(self) -> int:
        """Links are judged together: one alone may look harmless and lead out through another."""
        dropped = 0
        for path, target, name in self._links:
            if not path.is_symlink() or os.readlink(path) != target:
                continue
            real = os.path.realpath(path)
            if os.path.commonpath([real, self._root]) != str(self._root):
                path.unlink()
                dropped += 1
                self._leave_out(name, "a link that leads out of the target directory")
        return dropped


def _plain(parts: List[str]) -> bool:
    # A backslash or a colon is an ordinary character here and a way out on Windows.
    return all(part != ".." and (os.sep == "/" or not any(c in part for c in "\\:")) for part in parts)


def _make_directory(path: Path) -> bool:
    """Whether it is a directory now, and not a link to one."""
    try:
        path.mkdir()
    except FileExistsError:
        return not path.is_symlink() and path.is_dir()
    return True
