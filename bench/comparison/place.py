"""Where the comparison keeps what it installs: one directory below `target/`, nothing on the system itself.

Everything here is done once: a second run finds it and says nothing.
"""

import hashlib
import os
import shutil
import subprocess
import sys

from .adapter import Missing

INSTALL_SECONDS = 900


class Place:
    def __init__(self, root, carrel, bench, install=True):
        self.root = root
        self.carrel = carrel
        self.bench = bench
        self.install = install
        self.python = os.path.realpath(sys.executable)
        os.makedirs(root, exist_ok=True)

    def path(self, *parts):
        return os.path.join(self.root, *parts)

    def venv(self, *packages):
        """The python of a virtualenv with these packages, named as pip does."""
        name = hashlib.sha256("\n".join((self.python, *packages)).encode()).hexdigest()[:12]
        home = self.path("venvs", f"{packages[0].partition('=')[0]}-{name}")
        python, done = os.path.join(home, "bin", "python"), os.path.join(home, "installed")
        if not os.path.exists(done):
            self.must_install(", ".join(packages))
            shutil.rmtree(home, ignore_errors=True)
            run([self.python, "-m", "venv", home], "making a virtualenv (Debian: package python3-venv)")
            run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
                f"installing {' '.join(packages)}")
            with open(done, "w"):
                pass
        return python

    def debian(self, command, *packages):
        """A command of these Debian packages, unpacked and not installed; the system's own where it has it."""
        found = shutil.which(command)
        if found:
            return found
        home = self.path("debian", packages[0])
        unpacked = [os.path.join(home, "root", part, command) for part in ("usr/bin", "usr/sbin")]
        if not any(map(os.path.exists, unpacked)):
            if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
                raise Missing(f"no {command} here, and this is not a Debian that could fetch it")
            self.must_install(", ".join(packages))
            shutil.rmtree(home, ignore_errors=True)
            os.makedirs(home)
            fetch = ["apt-get", "-qq", "download", *packages]
            try:
                run(fetch, f"fetching {' '.join(packages)}", cwd=home)
            except Missing:
                # Lists of packages grow old; only root can renew them.
                run(["apt-get", "-qq", "update"], "renewing the lists of packages")
                run(fetch, f"fetching {' '.join(packages)}", cwd=home)
            for package in sorted(name for name in os.listdir(home) if name.endswith(".deb")):
                run(["dpkg-deb", "-x", os.path.join(home, package), os.path.join(home, "root")], "unpacking")
        for path in unpacked:
            if os.path.exists(path):
                return path
        raise Missing(f"{command} is not in {' '.join(packages)}")

    def must_install(self, what):
        if not self.install:
            raise Missing(f"{what} would have to be installed")
        print(f"installing {what}", file=sys.stderr)


def run(argv, what, cwd=None):
    try:
        done = subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{what}: {error}") from None
    if done.returncode:
        last = done.stdout.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        raise Missing(f"{what}: {last[0]}")
