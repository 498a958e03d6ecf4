"""Documents too large to hold: a JSON line or a text file of hundreds of megabytes, read in pieces.

A piece ends before a single space between two printable ASCII characters, where some tokenizers promise
(`cuts_before_spaces`) that the ids of the pieces are the ids of the whole. Of a JSON line only the wanted
strings are kept; the values of other keys are passed over: scalars are checked, of nested ones only the
brackets and strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence

from megatron_rgpt.data.inputs import InputStream

# A document beyond this is read in pieces.
GIANT_BYTES = 16 << 20
PIECE_BYTES = 1 << 20

STRING_BODY = re.compile(rb'[^"\\\n]*(?:\\[^\n][^"\\\n]*)*')
SCALAR = re.compile(rb'[^,}\]"{\[\n]*')
WHITE = re.compile(rb"[ \t\r]*")


class BadDocument(Exception):
    """Why a document cannot be used."""


class Feed:
    """A stream with a buffer in front: `data` is what is read and not yet dropped."""

    def __init__(self, stream: InputStream) -> None:
        self._stream = stream
        self.data = bytearray()
        self.offset = 0  # of data[0] behind where the feed began

    def more(self) -> bool:
        """Read another block; False at the stream's end."""
        block = self._stream.read(PIECE_BYTES)
        self.data += block
        return bool(block)

    def drop(self, count: int) -> None:
        del self.data[:count]
        self.offset += count


class TextCutter:
    """Collects text and hands it out in pieces that end where a cut is safe."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, text: str) -> str:
        """What can be handed out so far, perhaps nothing."""
        if not (cut := last_safe_cut(text)):
            self._parts.append(text)
            return ""
        piece = "".join([*self._parts, text[:cut]])
        self._parts = [text[cut:]]
        return piece

    def rest(self) -> str:
        return "".join(self._parts)


def last_safe_cut(text: str) -> int:
    """The last place before a single space between two printable ASCII characters; 0 where there is none."""
    at = text.rfind(" ", 0, len(text) - 1)
    while at > 0:
        if "!" <= text[at - 1] <= "~" and "!" <= text[at + 1] <= "~":
            return at
        at = text.rfind(" ", 0, at)
    return 0


def text_pieces(stream: InputStream) -> Iterator[str]:
    """A whole text file, in pieces. Raises BadDocument for invalid UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    cutter = TextCutter()
    done = 0
    while True:
        block = stream.read(PIECE_BYTES)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # The decoder counts from what it kept of earlier blocks, at most three bytes before this one.
            raise BadDocument(f"invalid UTF-8 near byte {done + error.start}") from None
        done += len(block)
        if not block:
            yield cutter.rest() + text
            return
        if piece := cutter.add(text):
            yield piece


class GiantLine:
    """One JSON object on the line at the front of a feed, read as pieces of the strings under `keys`."""

    def __init__(self, feed: Feed, keys: Sequence[str]) -> None:
        self._feed = feed
        self._keys = list(keys)

    def pieces(self) -> Iterator[tuple[int, str]]:
        """(number of the key, piece of its text), and the feed stands behind the object at the end.

        Raises:
            BadDocument: broken JSON, a wanted key missing, twice, or not a string.
        """
        seen: set[str] = set()
        self._expect(b"{", "an object")
        if self._next() != b"}":
            while True:
                key = self._short_string()
                self._expect(b":", "a colon")
                if key in self._keys:
                    if key in seen:
                        raise BadDocument(f"key {key!r} twice")
                    seen.add(key)
                    if self._next() != b'"':
                        raise BadDocument(f"{key!r} is not a string")
                    number = self._keys.index(key)
                    for piece in self._string():
                        yield number, piece
                else:
                    self._pass_over()
                if self._next() == b"}":
                    break
                self._expect(b",", "a comma")
        self._expect(b"}", "the object's end")
        missing = [key for key in self._keys if key not in seen]
        if missing:
            raise BadDocument(f"no key {missing[0]!r}")

    def leave(self) -> bool:
        """Drop what is left of the line, its end included; whether there was only white space."""
        clean = True
        while True:
            end = self._feed.data.find(b"\n")
            part = self._feed.data[: end if end >= 0 else len(self._feed.data)]
            clean = clean and not part.strip()
            if end >= 0:
                self._feed.drop(end + 1)
                return clean
            self._feed.drop(len(part))
            if not self._feed.more():
                return clean

    def _next(self) -> bytes:
        """The next character that is no white space, left in place."""
        while True:
            white = WHITE.match(self._feed.data)
            self._feed.drop(white.end() if white else 0)
            if self._feed.data:
                return bytes(self._feed.data[:1])
            if not self._feed.more():
                raise BadDocument("broken JSON: the line ends within the object")

    def _expect(self, character: bytes, what: str) -> None:
        found = self._next()
        if found != character:
            raise BadDocument(f"broken JSON: expected {what}, found {found.decode('latin-1')!r}")
        self._feed.drop(1)

    def _short_string(self) -> str:
        if self._next() != b'"':
            raise BadDocument("broken JSON: a key is not a string")
        return "".join(self._string())

    def _string(self) -> Iterator[str]:
        """The string at the front, decoded, in pieces that end at safe cuts."""
        self._expect(b'"', "a string")
        cutter = TextCutter()
        for raw, last in self._raw_parts():
            text = _decode(raw)
            if last:
                yield cutter.rest() + text
            elif piece := cutter.add(text):
                yield piece

    def _raw_parts(self) -> Iterator[tuple[bytes, bool]]:
        """The undecoded string up to its closing quote, which is dropped; cut before spaces.

        A space byte lies in no escape, no UTF-8 sequence and between no two halves of a surrogate pair.
        """
        at = 0
        while True:
            match = STRING_BODY.match(self._feed.data, at)
            end = match.end() if match else at
            stop = self._feed.data[end : end + 1]
            if stop == b'"':
                raw = bytes(self._feed.data[:end])
                self._feed.drop(end + 1)
                yield raw, True
                return
            if stop == b"\n" or self._feed.data[end : end + 2] == b"\\\n":
                raise BadDocument("broken JSON: the line ends within a string")
            cut = self._feed.data.rfind(b" ", 1, end)
            if cut > 0 and end >= PIECE_BYTES:
                raw = bytes(self._feed.data[:cut])
                self._feed.drop(cut)
                end -= cut
                yield raw, False
            at = end
            if not self._feed.more():
                raise BadDocument("broken JSON: the line ends within a string")

    def _pass_over(self) -> None:
        """Skip a value of no interest."""
        depth = 0
        while True:
            first = self._next()
            if first == b'"':
                for raw, _ in self._raw_parts_of_string():
                    _decode(raw)
            elif first in (b"{", b"["):
                depth += 1
                self._feed.drop(1)
            elif first in (b"}", b"]") and depth:
                depth -= 1
                self._feed.drop(1)
            elif first in (b",", b":") and depth:
                self._feed.drop(1)
                continue
            else:
                self._scalar()
            if depth == 0:
                return

    def _raw_parts_of_string(self) -> Iterator[tuple[bytes, bool]]:
        self._expect(b'"', "a string")
        return self._raw_parts()

    def _scalar(self) -> None:
        while True:
            match = SCALAR.match(self._feed.data)
            end = match.end() if match else 0
            if end < len(self._feed.data) or not self._feed.more():
                break
        raw = bytes(self._feed.data[:end])
        try:
            json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError):
            raise BadDocument(f"broken JSON: {raw[:20].decode('latin-1')!r} is no value") from None
        self._feed.drop(end)


def _decode(raw: bytes) -> str:
    try:
        return json.loads('"' + raw.decode("utf-8") + '"')
    except UnicodeDecodeError:
        raise BadDocument("invalid UTF-8 in a string") from None
    except ValueError as error:
        raise BadDocument(f"broken JSON: {error}") from None
