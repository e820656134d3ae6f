"""Bytes, text and the bounded memory of a stream."""

import base64
import random

import pytest

from carrel._errors import ProtocolError
from carrel._output import Collector, Output, TextDecoder, from_bytes, to_bytes, to_name


@pytest.mark.parametrize("data", [b"", b"plain", "grüße 🦀".encode(), b"\xff\x00", "🦀".encode()[:2]])
def test_bytes_there_and_back(data: bytes) -> None:
    assert to_bytes(from_bytes(data)) == data


@pytest.mark.parametrize("value", [None, 1, {}, {"base64": 1}, {"base64": "*"}, ["x"]])
def test_what_is_no_bytes(value: object) -> None:
    with pytest.raises(ProtocolError):
        to_bytes(value)


def test_names_that_are_not_utf8() -> None:
    assert to_name({"base64": base64.b64encode(b"a\xff").decode()}) == "a\udcff"
    assert to_name("grüße") == "grüße"


def test_a_character_in_two_pieces_arrives_whole() -> None:
    data = "a🦀ü".encode()
    for cut in range(len(data) + 1):
        decoder = TextDecoder()
        assert decoder.feed(data[:cut]) + decoder.feed(data[cut:]) + decoder.finish() == "a🦀ü"


def test_a_character_that_never_ends() -> None:
    decoder = TextDecoder()
    assert decoder.feed("🦀".encode()[:3]) == ""
    assert decoder.finish() == "\ufffd"


def test_head_and_tail_are_exact() -> None:
    chance = random.Random(4)
    data = chance.randbytes(5000)
    for limit in (0, 1, 2, 7, 100, 4999, 5000, 6000):
        collector = Collector(limit)
        at = 0
        while at < len(data):
            piece = data[at : at + chance.randrange(1, 700)]
            assert collector.add(piece, at) == 0
            at += len(piece)
        kept = collector.output()
        assert len(kept.head) + len(kept.tail) + kept.omitted == len(data)
        assert len(kept.head) + len(kept.tail) <= limit
        assert data.startswith(kept.head)
        assert data.endswith(kept.tail)
        if limit >= len(data):
            assert kept.data == data


def test_a_jump_is_counted_and_named() -> None:
    collector = Collector(100)
    assert collector.add(b"abc", 0) == 0
    assert collector.add(b"xyz", 10) == 7
    assert collector.output() == Output(b"abc", b"xyz", 7)
    assert "7 bytes left out" in collector.output().text


def test_a_reply_that_was_cut() -> None:
    kept = Output.parse({"head": "a", "tail": {"base64": "/w=="}, "omitted_bytes": 5})
    assert kept == Output(b"a", b"\xff", 5)
    assert kept.text.startswith("a\n[")
