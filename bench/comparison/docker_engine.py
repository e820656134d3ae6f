"""A Docker engine of the comparison's own, and as much of its API as a session needs.

Through the API and not the command line, whose start alone takes longer than much of what is measured. The engine listens on a
socket in a directory of its own, has no bridge and touches no firewall; its images stay between runs.
"""

import contextlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time

VERSION = "v1.41"
START_SECONDS = 60
END_SECONDS = 30
IMAGE = "carrel-compare"


class Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=120)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class DockerEngine:
    def __init__(self, dockerd, data):
        self.directory = tempfile.mkdtemp(prefix="carrel-compare-docker-")
        self.socket = os.path.join(self.directory, "sock")
        self.log = os.path.join(self.directory, "log")
        parts = os.path.dirname(os.path.dirname(dockerd))
        path = os.pathsep.join([os.path.join(parts, "bin"), os.path.join(parts, "sbin"), os.environ.get("PATH", "")])
        argv = [dockerd, "--host", f"unix://{self.socket}", "--data-root", data,
                "--exec-root", os.path.join(self.directory, "exec"), "--pidfile", os.path.join(self.directory, "pid"),
                "--bridge", "none", "--iptables=false", "--ip6tables=false", "--group", str(os.getgid())]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(argv, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log)
        try:
            self.await_start()
            for container in self.ask("GET", "/containers/json?all=1"):
                self.remove(container["Id"])
        except BaseException:
            self.end()
            raise

    def await_start(self):
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.info = self.ask("GET", "/version")
                return
            if self.process.poll() is not None or time.monotonic() > until:
                with open(self.log, errors="replace") as log:
                    last = log.read().strip().splitlines()[-1:] or ["it said nothing"]
                raise RuntimeError(f"dockerd does not start here: {last[0][-300:]}")
            time.sleep(0.05)  # Its socket says nothing before it is there.

    def ask(self, method, path, body=None, kind="application/json"):
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection = Connection(self.socket)
        try:
            connection.request(method, f"/{VERSION}{path}", data, {"Content-Type": kind})
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        if reply.status >= 400:
            raise RuntimeError(text.decode(errors="replace").strip()[:300])
        return json.loads(text) if reply.getheader("Content-Type") == "application/json" and text else text

    def has_image(self):
        try:
            self.ask("GET", f"/images/{IMAGE}/json")
        except RuntimeError:
            return False
        return True

    def import_image(self):
        self.ask("POST", f"/images/create?fromSrc=-&repo={IMAGE}&tag=latest", root_filesystem(), "application/x-tar")

    def attach(self, container):
        """The streams of a container, as a socket."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(120)
        connection.connect(self.socket)
        connection.sendall(f"POST /{VERSION}/containers/{container}/attach?stream=1&stdin=1&stdout=1 HTTP/1.1\r\n"
                           "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)
            if not byte:
                break
            head += byte
        if b" 101 " not in head.partition(b"\r\n")[0]:
            connection.close()
            raise RuntimeError(f"attaching: {head[:200]!r}")
        return connection

    def remove(self, container):
        self.ask("DELETE", f"/containers/{container}?force=1")

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def root_filesystem():
    """This very python with its own modules and the libraries it is linked to, as an archive."""
    python, library = os.path.realpath(sys.executable), sysconfig.get_path("stdlib")
    programs = [python, *(path for path in map(shutil.which, ("bash", "true")) if path)]
    modules = os.path.join(library, "lib-dynload")
    linked = {path for path in programs} | {os.path.join(modules, name) for name in os.listdir(modules)}
    files = set(programs)
    for program in linked:
        said = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        files.update(word for word in said.split() if word.startswith("/"))
    leave_out = ("site-packages", "dist-packages", "test", "idlelib", "turtledemo", "ensurepip")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        for path in sorted(files):
            tar.add(path, arcname=path.lstrip("/"))
        tar.add(library, arcname=library.lstrip("/"),
                filter=lambda entry: None if set(entry.name.split("/")) & set(leave_out) else entry)
    return archive.getvalue()
