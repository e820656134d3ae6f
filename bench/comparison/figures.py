"""What came out: samples of one measure and one system, and what is said of them."""

from dataclasses import dataclass, field

MB = 1 << 20


def at(samples, part):
    """The sample at this part of the sorted whole; carrel-bench counts the same way."""
    return sorted(samples)[round((len(samples) - 1) * part)] if samples else None


@dataclass
class Figure:
    measure: str
    system: str
    seconds: list = field(default_factory=list)
    """One per sample."""
    floor: list = field(default_factory=list)
    """Samples of the floor, taken in the same rounds."""
    per_sample: int = 1
    """Of how many creations one sample is made, in measures of many at a time."""
    flood: int = 0
    """Of how many bytes one sample is made."""
    memory: int | None = None
    """Bytes of one idle session."""
    failed: str = ""
    cannot: str = ""

    @property
    def measured(self):
        return bool(self.seconds) or self.memory is not None

    @property
    def p50(self):
        return at(self.seconds, 0.5)

    @property
    def ratio(self):
        """How many times the floor one creation, or one call, takes."""
        floor = at(self.floor, 0.5)
        if not self.seconds or not floor or self.flood:
            return None
        return self.p50 / self.per_sample / floor

    @property
    def rate(self):
        """Creations or bytes per second."""
        many = self.flood or (self.per_sample if self.per_sample > 1 else 0)
        return many / self.p50 if many and self.seconds else None

    def as_json(self):
        said = {
            "measure": self.measure, "system": self.system, "n": len(self.seconds), "best": at(self.seconds, 0),
            "p50": self.p50, "p99": at(self.seconds, 0.99), "floor_p50": at(self.floor, 0.5), "floor_n": len(self.floor),
            "ratio": self.ratio, "rate": self.rate, "memory": self.memory, "failed": self.failed, "cannot": self.cannot,
        }
        return {name: value for name, value in said.items() if value not in (None, "")}
