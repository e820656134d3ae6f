"""What an adapter is: one system, as much of it as is needed to measure it.

An adapter's file is imported twice. In the process that compares, to know its name and to install what it needs: so nothing
that has to be installed is imported at the top. And in a worker (`worker.py`), which asks it for sessions and times them.
Adapters in other languages say with `command` what to start instead; it must speak the same lines.
"""

class Missing(Exception):
    """The system is not here and cannot be made to be; the text says why."""


class Cannot(Exception):
    """The system is here but has no such thing."""


class Session:
    """A line of work: an interpreter that answers, and keeps its state between calls."""

    def call(self):
        """One small call; returns when the result is here, and raises if it is not 42."""
        raise NotImplementedError

    def flood(self, count):
        """So many bytes of output of the session's code, read by the caller."""
        raise Cannot("a session's output is not made for it")

    def freeze(self):
        """Puts it to sleep; the next call wakes it."""
        raise Cannot("it has no standby")

    def pids(self):
        """The roots of the process trees that exist because of this session."""
        return []

    def close(self):
        """Ends it and everything in it. Never counted."""


class Adapter:
    key = ""
    """The name on the command line and in the JSON."""
    title = ""
    """The name in the table and in the chart."""
    walls = "none"
    """What is between the code and the host."""
    note = ""
    """What has to be known to read its figures."""
    ours = False
    languages = ("python",)
    python = ""
    """Set by `prepare`: the python of the worker, if it is not the one that compares."""
    arguments = ()
    """Set by `prepare`: what `start` is given."""

    def prepare(self, place):
        """Installs what it needs into `place`, a `place.Place`. Raises `Missing`."""

    def command(self, place):
        """The program that answers lines."""
        return [self.python or place.python, "-m", "comparison.worker", self.key, *self.arguments]

    def start(self, *arguments):
        """In the worker, before the first session: a server of its own, if it needs one."""

    def version(self):
        """In the worker: which version this is."""
        return ""

    def session(self, language):
        """In the worker: a new session that may not have answered yet."""
        raise NotImplementedError

    def server_pids(self):
        """In the worker: processes that are there whether or not there is a session."""
        return []

    def end(self):
        """In the worker: ends what `start` has started."""

