"""A real daemon for the tests, and a way to it that breaks."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import carrel

# A loaded machine is slow; a daemon that is not there after this is broken.
START = 120.0


class Daemon:
    """`carrel serve` with a state of its own, on a unix socket and on TCP."""

    def __init__(self, *, tcp: bool = True) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="carrel-sdk-")
        self._place = Path(self._directory.name)
        self.socket = str(self._place / "carrel.sock")
        self.url = ""
        self._tcp = tcp
        self._process: Optional[subprocess.Popen[str]] = None
        self.said: List[str] = []

    def start(self) -> None:
        binary = os.environ.get("CARREL_BIN")
        assert binary, "CARREL_BIN must name the program that is tested"
        command = [binary, "--state", str(self._place / "state"), "serve", "--socket", self.socket]
        if self._tcp:
            # The second time at the same address: clients that were there come back to it.
            command += ["--listen", self.url[len("http://") :] or "127.0.0.1:0"]
        environment: Dict[str, str] = {k: v for k, v in os.environ.items() if not k.startswith("CARREL_")}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        wanted = 2 if self._tcp else 1
        up = threading.Event()
        found: List[str] = []

        def listen(process: subprocess.Popen[str]) -> None:
            assert process.stderr is not None
            with process.stderr as lines:
                for line in lines:
                    self.said.append(line)
                    _, here, address = line.strip().partition("listening on ")
                    if here:
                        found.append(address.split()[0])
                        if len(found) == wanted:
                            up.set()
            up.set()

        self._reader = threading.Thread(target=listen, args=(self._process,))
        self._reader.start()
        up.wait(START)
        if len(found) < wanted:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._directory.cleanup()
            raise AssertionError("the daemon did not start:\n" + "".join(self.said))
        self.url = next((address for address in found if address.startswith("http://")), "")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(START)
        self._reader.join()
        self._process = None
        return code

    def stop(self) -> None:
        """Closes every sandbox first: they would outlive it."""
        try:
            with carrel.Carrel(socket=self.socket) as client:
                for sandbox in client.sandboxes.list():
                    sandbox.close()
        finally:
            if self._process is not None:
                self._end(signal.SIGTERM)
            self._directory.cleanup()


class BreakingProxy:
    """Passes TCP connections on to a daemon, and resets each after a random number of bytes from there."""

    def __init__(self, url: str, seed: int, least: int, most: int) -> None:
        host, _, port = url[len("http://") :].partition(":")
        self._upstream: Tuple[str, int] = (host, int(port))
        self._chance = random.Random(seed)
        self._least, self._most = least, most
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._threads: List[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            budget = self._chance.randint(self._least, self._most)
            thread = threading.Thread(target=self._serve, args=(client, budget))
            thread.start()
            self._threads.append(thread)

    def _serve(self, client: socket.socket, budget: int) -> None:
        with client, socket.create_connection(self._upstream) as upstream:
            back = threading.Thread(target=_pass, args=(client, upstream))
            back.start()
            try:
                while budget > 0:
                    data = upstream.recv(min(65536, budget))
                    if not data:
                        break
                    budget -= len(data)
                    client.sendall(data)
                else:
                    self.cuts += 1
                    # A reset rather than an end, as a machine that vanishes would look.
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except OSError:
                pass
            finally:
                for one in (client, upstream):
                    try:
                        one.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass
            back.join()

    def close(self) -> None:
        # Closing alone does not wake the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> BreakingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pass(source: socket.socket, target: socket.socket) -> None:
    try:
        while True:
            data = source.recv(65536)
            if not data:
                break
            target.sendall(data)
    except OSError:
        pass
    try:
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
