"""The parser of server-sent events, cut at every byte."""

import pytest

from carrel._errors import ProtocolError
from carrel._sse import MAX_MESSAGE, Message, Parser

STREAM = '\ufeff: hello\nevent: stdout\nid: a/b/1\ndata: {"data": "grüße 🦀"}\n\ndata: one\ndata:two\ndata\n\n:keep\n\nevent: nothing\n\nevent:end\ndata: {}\n\n'
WANTED = [
    Message("stdout", '{"data": "grüße 🦀"}', "a/b/1"),
    Message("message", "one\ntwo\n", None),
    Message("end", "{}", None),
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_any_cut_gives_the_same_messages(end: str) -> None:
    stream = STREAM.replace("\n", end).encode()
    for cut in range(len(stream) + 1):
        parser = Parser()
        assert parser.feed(stream[:cut]) + parser.feed(b"") + parser.feed(stream[cut:]) == WANTED, cut


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_byte_by_byte(end: str) -> None:
    parser = Parser()
    found = [message for byte in STREAM.replace("\n", end).encode() for message in parser.feed(bytes([byte]))]
    assert found == WANTED


def test_mixed_line_ends() -> None:
    assert Parser().feed(b"data: a\r\ndata: b\rdata: c\n\r\n") == [Message("message", "a\nb\nc")]


def test_what_is_not_finished_is_not_given() -> None:
    parser = Parser()
    assert parser.feed(b"id: 1\ndata: whole\n\nid: 2\ndata: half\n") == [Message("message", "whole", "1")]


def test_an_id_with_a_nul_is_ignored() -> None:
    assert Parser().feed(b"id: a\0b\ndata: x\n\n") == [Message("message", "x", None)]


def test_a_message_without_end_is_refused_rather_than_held() -> None:
    parser = Parser()
    parser.feed(b"data: ")
    piece = bytes(1024 * 1024)
    with pytest.raises(ProtocolError):
        for _ in range(MAX_MESSAGE // len(piece) + 1):
            parser.feed(piece)


def test_many_lines_count_as_one_message() -> None:
    parser = Parser()
    line = b"data: " + b"x" * 1024 * 1024 + b"\n"
    with pytest.raises(ProtocolError):
        for _ in range(MAX_MESSAGE // len(line) + 2):
            parser.feed(line)


def test_data_that_is_not_json() -> None:
    with pytest.raises(ProtocolError, match="end"):
        Message("end", "{").json()
