"""Docker: a container for every session, of an image that holds this host's own python. Debian's engine, started for the run."""

import os
import struct
import sys

from ..adapter import Adapter, Missing
from ..docker_engine import IMAGE, DockerEngine
from ..piped import PipedSession, interpreter

PACKAGES = ("docker.io", "containerd", "runc", "tini")


class Container(PipedSession):
    def __init__(self, engine, language):
        self.engine, self.language, self.left = engine, language, 0
        command = interpreter(language, os.path.realpath(sys.executable))
        made = engine.ask("POST", "/containers/create", {
            "Image": IMAGE, "Cmd": command, "OpenStdin": True, "StdinOnce": True, "AttachStdin": True,
            "AttachStdout": True, "NetworkDisabled": True, "HostConfig": {"NetworkMode": "none"}})
        self.id = made["Id"]
        try:
            self.stream = engine.attach(self.id)
            engine.ask("POST", f"/containers/{self.id}/start")
        except BaseException:
            engine.remove(self.id)
            raise

    def write(self, data):
        self.wake()
        self.stream.sendall(data)

    def read(self, most):
        # Output comes in frames: which stream, three zeros, and a length.
        if not self.left:
            head = b""
            while len(head) < 8:
                part = self.stream.recv(8 - len(head))
                if not part:
                    return b""
                head += part
            self.left = struct.unpack(">BxxxL", head)[1]
        part = self.stream.recv(min(most, self.left))
        self.left -= len(part)
        return part

    frozen = False

    def freeze(self):
        self.engine.ask("POST", f"/containers/{self.id}/pause")
        self.frozen = True

    def wake(self):
        if self.frozen:
            self.engine.ask("POST", f"/containers/{self.id}/unpause")
            self.frozen = False

    def last_words(self):
        return "the interpreter has ended"

    def pids(self):
        pid = self.engine.ask("GET", f"/containers/{self.id}/json")["State"]["Pid"]
        with open(f"/proc/{pid}/stat") as stat:
            # With its shim, which every container has.
            return [int(stat.read().rpartition(")")[2].split()[1])]

    def close(self):
        self.stream.close()
        self.engine.remove(self.id)


class Docker(Adapter):
    key = "docker"
    title = "Docker"
    walls = "container"
    note = "a plain interpreter in a container, through the engine's API; standby is pause"
    languages = ("python", "bash")

    def prepare(self, place):
        if os.geteuid():
            raise Missing("its engine needs root")
        self.arguments = [place.debian("dockerd", *PACKAGES), place.path("docker")]

    def start(self, dockerd, data):
        self.engine = DockerEngine(dockerd, data)
        if not self.engine.has_image():
            print("building Docker's image", file=sys.stderr)
            self.engine.import_image()

    def version(self):
        return f"{self.engine.info['Version']}"

    def session(self, language):
        return Container(self.engine, language)

    def server_pids(self):
        return [self.engine.process.pid]

    def end(self):
        if hasattr(self, "engine"):
            self.engine.end()
