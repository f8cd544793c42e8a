"""Physical lines of a text file, and the records that consist of these lines.

A record is one line, or several lines if a quoted field has line breaks. This module decides for
each line whether it belongs to a record of several lines. An unbalanced quote therefore affects at
most its own line. Every line of a file is counted once (`LineCounts`): as part of a record, as
rejected, as blank, as a comment, or as a header. DuckDB splits each record into fields (see the
module `text`).
"""

import bz2
import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evergreen.runtime.errors import ContractError

BLOCK_BYTES = 4 << 20
"""Size of a block of lines in bytes. A block has about 17,000 Criteo rows."""
_MAX_LINE_BYTES = 1 << 20
_MAX_RECORD_LINES = 100
"""Maximum number of lines of one record. A quote that is not closed within this number of lines is
treated as a stray quote."""
_READ_BYTES = 256 << 10
_HEAD_BYTES = 1 << 16
_MIN_HEAD = 16
"""Minimum size of a file, in bytes, for detecting UTF-16 by its zero bytes."""
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_OTHERS = {
    b"PK\x03\x04": "a zip archive or a spreadsheet, expected it unpacked or saved as CSV",
    b"7z\xbc\xaf": "a 7z archive, expected it unpacked",
    b"SQLite f": "an SQLite database, expected a table of it as CSV or Parquet",
    b"ARROW1": "an Arrow file, expected Parquet or text",
    b"Obj\x01": "an Avro file, expected Parquet or text",
    b"%PDF": "a PDF, expected a table of it as CSV or Parquet",
    b"\xfd7zXZ\x00": "an xz file, expected it unpacked, or packed by gzip, bzip2 or zstd",
}
_INSIDE = {
    b"PAR1": "holds Parquet inside another packing, expected the Parquet file itself",
    **{begin: f"holds {text}" for begin, text in _OTHERS.items()},
}
"""First bytes of formats that are not text, and the message about each format."""


@dataclass
class LineCounts:
    """Number of a file's lines of each kind.

    A record's first line is counted in `rows` or `rejected`. All further lines of a record are
    counted in `continued`.
    """

    rows: int = 0
    """Number of records that became rows."""
    rejected: int = 0
    """Number of records and single lines that did not become rows. The file of malformed rows lists
    the line number and the reason of each rejected line."""
    continued: int = 0
    """Number of lines of records, not counting the first line of each record."""
    header: int = 0
    """Number of lines with the names of the columns. A file has several header lines if files with
    headers were concatenated."""
    blank: int = 0
    comments: int = 0
    """Number of lines that begin with `#` and do not have as many fields as a row."""

    @property
    def lines(self) -> int:
        """Return the number of all lines."""
        return sum(getattr(self, each.name) for each in fields(self))

    def add(self, other: "LineCounts") -> None:
        """Add the counts in `other` to these counts."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class Rejected(NamedTuple):
    """Line, or record of several lines, that is not a valid row."""

    line: int
    """Number of the first line, from 1."""
    reason: str
    text: str
    """First 2,000 characters of the text, as in the file."""


class Block(NamedTuple):
    """Complete lines of a file. The lines are UTF-8, and each line ends in a line feed."""

    first_line: int
    """Number of the first line in the file, from 1."""
    content: bytes
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Rules by which the lines of a text file are divided into fields."""

    delimiter: str
    """Delimiter, one character."""
    num_fields: int
    has_quotes: bool = True
    """Whether a field may be in double quotes."""
    escape: str = '"'
    """Character that escapes a quote inside quotes: another quote, or a backslash."""
    header: bytes | None = None
    """Text of the header record, without its line end. None if the file has no header."""
    has_comments: bool = False
    """Whether lines that begin with `#` are comments. Set this to True if the first line of the
    file begins with `#`."""

    @cached_property
    def _field(self) -> str:
        other = re.escape(self.delimiter)
        if not self.has_quotes:
            return rf"[^{other}\n]*"
        inside = r'[^"]*(?:""[^"]*)*' if self.escape == '"' else r'[^"\\]*(?:\\[\s\S][^"\\]*)*'
        return rf'(?:"{inside}"|[^"{other}\n][^{other}\n]*|)'

    @cached_property
    def plain_pattern(self) -> str:
        """Return the RE2 pattern of a complete record whose quotes only enclose complete fields."""
        other = re.escape(self.delimiter)
        plain = self._field.replace(rf'[^"{other}\n][^{other}\n]*', rf'[^"{other}\n]+')
        return rf"^{plain}(?:{other}{plain}){{{self.num_fields - 1}}}\n\z"

    @cached_property
    def _record(self) -> re.Pattern[str]:
        other = re.escape(self.delimiter)
        return re.compile(rf"{self._field}(?:{other}{self._field}){{{self.num_fields - 1}}}\n\Z")

    @cached_property
    def _any_record(self) -> re.Pattern[str]:
        return re.compile(rf"{self._field}(?:{re.escape(self.delimiter)}{self._field})*\n\Z")

    @cached_property
    def _first_field(self) -> re.Pattern[str]:
        return re.compile(rf"({self._field})(?:{re.escape(self.delimiter)}|\n\Z)")

    def is_record(self, text: str) -> bool:
        """Return whether `text` with its line end is a complete record."""
        return self._record.match(text) is not None

    def fields_of(self, text: str) -> list[str] | None:
        """Return the raw fields of a record, or None if its quotes are not balanced."""
        if not self._any_record.match(text):
            return None
        at, found = 0, list[str]()
        while at < len(text) and (field := self._first_field.match(text, at)):
            found.append(field[1])
            at = field.end()
        return found

    def literal(self, text: str) -> str | None:
        """Return the line as a record whose quotes are plain characters.

        Returns None if the record would have a wrong number of fields.
        """
        parts = text.removesuffix("\n").split(self.delimiter)
        if len(parts) != self.num_fields:
            return None
        return self.delimiter.join(map(self._quoted, parts)) + "\n"

    def plain(self, fields: list[str]) -> str:
        """Return raw fields as a record. In the record, quotes only enclose complete fields."""
        if not self.has_quotes:
            return self.delimiter.join(fields) + "\n"
        return (
            self.delimiter.join(
                text if text.startswith('"') else self._quoted(text) for text in fields
            )
            + "\n"
        )

    def _quoted(self, text: str) -> str:
        if '"' not in text:
            return text
        if self.escape == "\\":
            text = text.replace("\\", "\\\\")
        return '"' + text.replace('"', f'{self.escape}"') + '"'


class Records(NamedTuple):
    """The records of a block."""

    content: bytes
    """Bytes of the records, without any other lines. Each record is complete and has all fields of
    the dialect."""
    numbers: NDArray[np.int64]
    """Line number, in the file, of each record's first line."""
    rejected: list[Rejected]
    counts: LineCounts
    """Counts of the block's lines. `rows` is the number of records."""
    texts: "LineTexts"
    rest: Block | None
    """Last lines of the block, if the record of these lines may continue in the next block. None if
    every record is complete."""


@dataclass(frozen=True)
class LineTexts:
    """Lines of a block, with access by line number."""

    first_line: int
    lines: Any = field(repr=False)
    """Arrow array of binary values, each with its line end."""

    def of(self, number: int) -> str:
        """Return the text of a line for display."""
        return shown(self.lines[number - self.first_line].as_py())


def shown(line: bytes) -> str:
    r"""Return the first 2,000 characters of a line for display.

    >>> shown(bytes([97, 0xFF, 10]))
    'a\\xff'
    """
    return line[:2000].removesuffix(b"\n").removesuffix(b"\r").decode(errors="backslashreplace")


# -- blocks


def read_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield a text file in blocks of complete lines, in bounded memory.

    The blocks are UTF-8, and each line ends in a line feed. Files may be plain, gzip, bzip2 or
    zstd. The encoding is UTF-8, or UTF-16 if there is a byte order mark or every second byte is
    zero. If a file has no line feed, a carriage return ends a line.

    Raises:
        ContractError: The file is an archive or binary, corrupt or truncated, does not match its
            encoding, or has a line longer than `_MAX_LINE_BYTES`.
    """
    decoder, first_line, pending = _Decoder(path), 1, bytearray()
    with _opened(path) as file:
        # For a truncated gzip file, `read1` returns the readable data before it raises an error.
        read = getattr(file, "read1", file.read)
        while True:
            try:
                chunk = read(_READ_BYTES)
            except (EOFError, gzip.BadGzipFile, zlib.error, OSError, pa.ArrowException) as error:
                damage = "truncated" if isinstance(error, EOFError) else f"corrupt ({error})"
                num_lines = first_line - 1 + pending.count(b"\n")
                raise ContractError(
                    f"{path} is {damage} after {num_lines} complete lines, expected a complete file"
                ) from error
            pending += decoder.decode(bytes(chunk))
            if chunk and len(pending) < block_bytes:
                continue
            end = pending.rfind(b"\n") + 1
            if not chunk and end < len(pending):
                pending += b"\n"
                end = len(pending)
            if len(pending) - end > _MAX_LINE_BYTES:
                raise ContractError(
                    f"{path} has a line longer than {_MAX_LINE_BYTES} bytes, expected rows of a "
                    "click log"
                )
            if end or not chunk:
                content = bytes(pending[:end])
                if len(content) > _MAX_LINE_BYTES:
                    _expect_short_lines(path, content)
                yield Block(first_line, content, is_last=not chunk)
                first_line += content.count(b"\n")
                del pending[:end]
            if not chunk:
                return


def _expect_short_lines(path: Path, content: bytes) -> None:
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == 10)
    if np.diff(ends, prepend=-1).max() > _MAX_LINE_BYTES + 1:
        raise ContractError(
            f"{path} has a line longer than {_MAX_LINE_BYTES} bytes, expected rows of a click log"
        )


def _opened(path: Path) -> IO[bytes]:
    with open(path, "rb") as file:
        magic = file.read(8)
    if other := next((text for begin, text in _OTHERS.items() if magic.startswith(begin)), None):
        raise ContractError(f"{path} is {other}")
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(path)  # type: ignore[return-value]
    if magic.startswith(b"BZh") and magic[4:8] == b"1AY&":
        return bz2.open(path)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")  # type: ignore[no-any-return]
    return open(path, "rb")


class _Decoder:
    """Converts a file's bytes to UTF-8 with line feeds.

    The first chunk determines the encoding and the line end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder: codecs.IncrementalDecoder | None = None
        self._begun = False
        self._ends_by_cr = False
        self._held = b""

    def decode(self, chunk: bytes) -> bytes:
        """Return the next bytes as UTF-8. An empty chunk marks the end of the file."""
        if not self._begun and chunk:
            self._begin(chunk)
        if not chunk and self._held:
            self._held = b""
            return b"\n"  # a carriage return at the end of the file ends its last line
        if self._decoder is not None:
            try:
                chunk = self._decoder.decode(chunk, final=not chunk).encode()
            except UnicodeDecodeError as error:
                raise ContractError(
                    f"{self._path} cannot be decoded as {error.encoding}: {error.reason}"
                ) from error
        if self._ends_by_cr:
            return chunk.replace(b"\r", b"\n")
        chunk, self._held = self._held + chunk, b""
        if chunk.endswith(b"\r"):
            chunk, self._held = chunk[:-1], b"\r"
        return chunk.replace(b"\r\n", b"\n")

    def _begin(self, chunk: bytes) -> None:
        self._begun = True
        if text := next((text for begin, text in _INSIDE.items() if chunk.startswith(begin)), None):
            raise ContractError(f"{self._path} {text}")
        if chunk[257:262] == b"ustar":
            raise ContractError(f"{self._path} is a tar archive, expected it unpacked")
        encoding = next((name for bom, name in _BOMS if chunk.startswith(bom)), None)
        head = chunk[:_HEAD_BYTES]
        if encoding is None and len(head) >= _MIN_HEAD and head.count(0) > len(head) // 4:
            even, odd = head[::2].count(0), head[1::2].count(0)
            encoding = "utf-16-le" if odd > 4 * even else "utf-16-be" if even > 4 * odd else None
            if encoding is None:
                raise ContractError(f"{self._path} is binary, expected text, JSON lines or Parquet")
        if encoding is not None:
            self._decoder = codecs.getincrementaldecoder(encoding)()
            head = codecs.getincrementaldecoder(encoding)().decode(head).encode()
        self._ends_by_cr = b"\r" in head and b"\n" not in head


# -- records


def split_records(block: Block, dialect: Dialect) -> Records:
    """Split a block into records, and determine the kinds of its other lines.

    Raises:
        ContractError: A line has the names of the columns, but in another order than the header.
    """
    return _Splitter(block, dialect, _lines_of(block.content)).split()


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _holds(lines: Any, part: bytes) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.greater_equal(pc.find_substring(lines, part), 0).to_numpy(
        zero_copy_only=False
    )
    return found


def _lines_of(content: bytes) -> Any:
    data = np.frombuffer(content, np.uint8)
    offsets = np.concatenate([[0], np.flatnonzero(data == 10) + 1]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


class _Splitter:
    def __init__(self, block: Block, dialect: Dialect, lines: Any) -> None:
        self._block, self._dialect, self._lines = block, dialect, lines
        self._counts, self._rejected = LineCounts(), list[Rejected]()
        self._alone: dict[int, bool] = {}
        """Cached results for each line: whether the line alone is a complete record."""
        self._changed: dict[int, bytes] = {}
        """New texts of lines that were rewritten, by line number."""
        self._is_header = self._headers()
        """Mask of the header lines."""
        self._is_record = np.zeros(len(lines), bool)
        """Mask of the lines that begin a record."""
        self._in_record = np.zeros(len(lines), bool)
        """Mask of the lines that are part of a record."""

    def split(self) -> Records:
        regular, lines = self._regular(), self._without_last_delimiter()
        self._is_record[regular] = self._in_record[regular] = True
        done, rest_from = -1, len(self._lines)
        for line in np.flatnonzero(~self._is_record).tolist():
            if line > done:
                end = self._irregular_line(line)
                if end is None:
                    rest_from = line
                    break
                done = end
        kept = self._in_record[:rest_from]
        records = np.flatnonzero(self._is_record[:rest_from])
        if self._changed:
            texts = pa.array([self._changed[i] for i in sorted(self._changed)], pa.binary())
            lines = pc.replace_with_mask(
                lines, pa.array(np.isin(np.arange(len(lines)), list(self._changed))), texts
            )
        if lines is self._lines and len(kept) == len(lines) and kept.all():
            content = self._block.content
        else:
            content = b"".join(lines.slice(0, rest_from).filter(pa.array(kept)).to_pylist())
        self._counts.rows = len(records)
        self._counts.continued += int(kept.sum()) - len(records)
        return Records(
            content=content,
            numbers=records + self._block.first_line,
            rejected=self._rejected,
            counts=self._counts,
            texts=LineTexts(self._block.first_line, self._lines),
            rest=self._rest(rest_from),
        )

    def _rest(self, line: int) -> Block | None:
        if line == len(self._lines):
            return None
        begin = np.frombuffer(self._lines.buffers()[1], np.int32)[line]
        return Block(
            self._block.first_line + line, self._block.content[begin:], self._block.is_last
        )

    def _regular(self) -> NDArray[np.bool_]:
        """Return which lines are records that need no change.

        All lines of the block are checked at once.
        """
        lines, content, dialect = self._lines, self._block.content, self._dialect
        num_fields = pc.add(pc.count_substring(lines, dialect.delimiter), 1).to_numpy()
        regular: NDArray[np.bool_] = num_fields == dialect.num_fields
        if dialect.num_fields == 1:
            regular &= pc.binary_length(lines).to_numpy() > 1
        if dialect.has_quotes and b'"' in content:
            quoted = np.flatnonzero(_holds(lines, b'"'))
            found = pc.match_substring_regex(lines.take(pa.array(quoted)), dialect.plain_pattern)
            regular[quoted] = found.to_numpy(zero_copy_only=False)
        for each in (b"\r", b"\0"):
            if each in content:
                regular &= ~_holds(lines, each)
        regular &= ~self._is_header
        try:
            content.decode()
        except UnicodeDecodeError:
            regular &= [_is_utf8(line) for line in lines.to_pylist()]
        return regular

    def _headers(self) -> NDArray[np.bool_]:
        """Return a mask of the header lines.

        A header contains the names of the columns. A file has several header lines if files with
        headers were concatenated. The comparison ignores case and quotes.

        Raises:
            ContractError: A line has the same column names as the header in another order.
        """
        found, header = np.zeros(len(self._lines), bool), self._dialect.header
        if header is None:
            return found
        names = self._names_in(header)
        probe = max(names, key=len).encode()
        if not probe or probe not in self._block.content.lower():
            return found
        for at in np.flatnonzero(
            pc.match_substring(self._lines, probe, ignore_case=True).to_numpy(zero_copy_only=False)
        ):
            here = self._names_in(self._lines[int(at)].as_py())
            found[at] = here == names
            if here != names and sorted(here) == sorted(names):
                raise ContractError(
                    f"line {self._block.first_line + at} names the columns in another order than "
                    "line 1, expected one order of columns in the whole file"
                )
        return found

    def _names_in(self, line: bytes) -> list[str]:
        text = line.decode(errors="replace").lower().lstrip("#\ufeff")
        return [part.strip().strip('"').strip() for part in text.split(self._dialect.delimiter)]

    def _without_last_delimiter(self) -> Any:
        """Remove an extra delimiter from the end of lines, and return the lines.

        A line becomes a record if it has one field too many, and if the last field is empty. The
        whole block is processed at once. If every row ends in a delimiter, it would be slow to
        process the file line by line.
        """
        lines, dialect = self._lines, self._dialect
        delimiter = dialect.delimiter.encode()
        if delimiter.isspace() or delimiter + b"\n" not in self._block.content:
            return lines
        longer = pc.equal(pc.count_substring(lines, dialect.delimiter), dialect.num_fields)
        longer = pc.and_(longer, pc.ends_with(lines, delimiter + b"\n")).to_numpy(
            zero_copy_only=False
        )
        longer &= ~(
            _holds(lines, b'"') | _holds(lines, b"\r") | _holds(lines, b"\0") | self._is_record
        )
        longer &= ~self._is_header
        if not longer.any() or any(
            not _is_utf8(line) for line in lines.filter(pa.array(longer)).to_pylist()
        ):
            return lines
        cut = pc.binary_replace_slice(
            lines.filter(pa.array(longer)), start=-2, stop=-1, replacement=b""
        )
        self._is_record |= longer
        self._in_record |= longer
        return pc.replace_with_mask(lines, pa.array(longer), cut)

    def _irregular_line(self, line: int) -> int | None:
        """Classify a line that is not a complete record.

        Returns the index of the last line that was classified. Returns None if the classification
        needs lines of the next block.
        """
        dialect, raw = self._dialect, self._lines[line].as_py()
        if self._is_header[line]:
            self._counts.header += 1
            return line
        if not raw.strip(b" \r\n" if dialect.delimiter == "\t" else None):
            self._counts.blank += 1
            return line
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            return self._reject(line, line, f"byte {error.object[error.start]:#04x} is not UTF-8")
        if "\0" in text:
            return self._reject(line, line, "it has a zero byte")
        if "\r" in text.removesuffix("\n").removesuffix("\r"):
            return self._reject(line, line, "it has a carriage return inside the line")
        if trimmed := self._without_trailing(text):
            return self._accept(line, trimmed)
        text = text.replace("\r\n", "\n")
        fields = dialect.fields_of(text)
        if self._is_comment(line, text):
            self._counts.comments += 1
            return line
        if fields is not None:
            if len(fields) == dialect.num_fields:  # a field contains a quote
                return self._accept(line, dialect.plain(fields))
            return self._reject(
                line, line, f"{len(fields)} columns, expected {dialect.num_fields}{self._as_header}"
            )
        return self._open_quote(line, text)

    def _is_comment(self, line: int, text: str) -> bool:
        is_first = self._block.first_line + line == 1
        if is_first and re.fullmatch(r"sep=.\r?\n", text):  # written by Excel
            return True
        dialect = self._dialect
        return text.startswith("#") and (
            dialect.has_comments or not (dialect.delimiter in text or '"' in text)
        )

    @property
    def _as_header(self) -> str:
        """Return the header as text.

        The error about a wrong number of fields shows this text.
        """
        header = self._dialect.header
        return "" if header is None else f", as in the header {shown(header)[:80]!r}"

    def _without_trailing(self, text: str) -> str | None:
        """Return a line without the empty fields after the last column.

        Returns None if the line has no empty fields at its end, or if the shorter line is not a
        record.
        """
        delimiter = self._dialect.delimiter
        body = text.rstrip("\r\n")
        while body.endswith(delimiter):
            body = body[: -len(delimiter)]
            if self._dialect.is_record(f"{body}\n"):
                return self._dialect.plain(self._dialect.fields_of(f"{body}\n") or [])
        return None

    def _open_quote(self, line: int, text: str) -> int | None:
        """Classify a line with unbalanced quotes.

        A line with an open quote either begins a record of several lines, or has a stray quote.
        """
        dialect, last = self._dialect, min(line + _MAX_RECORD_LINES, len(self._lines)) - 1
        joined, alone, end = text, list[bool](), None
        for i in range(line + 1, last + 1):
            try:
                following = self._lines[i].as_py().decode()
            except UnicodeDecodeError:
                break
            joined += following
            alone.append(self._is_alone(i, following))
            if self._may_close(following) and dialect.is_record(joined):
                end = i
                break
        else:
            if line + _MAX_RECORD_LINES > len(self._lines) and not self._block.is_last:
                return None
        literal = dialect.literal(text)
        if end is not None:
            if not any(alone[:-1]) and (literal is None or not alone[-1]):
                self._is_record[line] = True
                self._in_record[line : end + 1] = True
                self._is_record[line + 1 : end + 1] = False
                self._changed |= {i: self._lines[i].as_py() for i in range(line, end + 1)}
                return end
            self._is_record[line : end + 1] = self._in_record[line : end + 1] = False
            return self._reject(line, end, "a quote opens here, and its closing quote is ambiguous")
        if literal is not None:
            return self._accept(line, literal)
        return self._reject(line, line, "a quote is not closed")

    def _may_close(self, text: str) -> bool:
        """Return whether a quote in the text is at the end of a field."""
        return f'"{self._dialect.delimiter}' in text or text.endswith(('"\n', '"\r\n'))

    def _is_alone(self, line: int, text: str) -> bool:
        if line not in self._alone:
            self._alone[line] = self._dialect.is_record(text)
        return self._alone[line]

    def _accept(self, line: int, text: str) -> int:
        self._is_record[line] = self._in_record[line] = True
        self._changed[line] = text.replace("\r\n", "\n").encode()
        return line

    def _reject(self, line: int, end: int, reason: str) -> int:
        for i in range(line, end + 1):
            number = self._block.first_line + i
            line_reason = (
                reason
                if i == line
                else f"in line {self._block.first_line + line} {reason.replace(' here', '')}"
            )
            self._rejected.append(Rejected(number, line_reason, shown(self._lines[i].as_py())))
        self._counts.rejected += end - line + 1
        return end
