"""The journal of a generation job: a killed job resumes without losing or repeating a finished batch."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from ..errors import FileError, UsageError
from ..files import locked, names_file, sync_folder, write
from .stats import Completion, GenerationStats

#: How a journal begins; what begins otherwise is somebody else's file.
MAGIC = b'{"skipdecode journal": 1, "job": "'


class Journal:
    """A file ``OUTPUT.partial`` that keeps finished batches, one JSON line each; its first line names the job.

    Each line ends in a checksum of itself and all lines before it. Reading stops at the first bad line (cut by a kill,
    damaged, doubled, of another release); the job generates that batch and later ones again. The output is locked while
    the journal is open; nothing is written before the first batch.

    Args:
        output: the file that the job will write; symbolic links are followed.
        job: the job's hash, from :func:`skipdecode.provenance.fingerprint`.
        replace: drop finished batches of another job, instead of raising UsageError.

    Attributes:
        rows: finished completions by item index.
        costs: the cost of each finished batch.

    Raises:
        UsageError: another process works on ``output``, or the finished batches belong to another job.
        FileError: ``OUTPUT.partial`` exists and is no journal.
        OSError: a method cannot write; the error names the file.
    """

    def __init__(self, output: Path, job: str, *, replace: bool = False) -> None:
        self.output = Path(os.path.realpath(output))
        self.path = self.output.with_name(self.output.name + ".partial")
        self.rows: dict[int, Completion] = {}
        self.costs: list[GenerationStats] = []
        self._header = MAGIC + job.encode() + b'"}'
        self._replace = replace
        self._good = self._chain = 0  # number of valid bytes, and their checksum
        self._file: BinaryIO | None = None
        with ExitStack() as stack:
            stack.enter_context(locked(self.output))
            self._read()
            self._lock = stack.pop_all()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and unlock the output for other processes, even if the disk is full."""
        with self._lock:
            if self._file:
                self._file.close()

    def check_output(self) -> None:
        """Raise FileError if the output exists and may not be replaced."""
        if self.output.exists() and not self._replace:
            raise FileError(f"{self.output} is already there: move it away, or give --overwrite to replace it")

    def _read(self) -> None:
        """Read the batches up to the first bad line. Raises FileError, or UsageError for another job's."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        if not data.startswith(MAGIC) and not MAGIC.startswith(data):
            raise FileError(f"{self.path} is not a journal of skipdecode: move it away, or give another --output")
        lines = _sealed(data)
        header = next((payload for payload, *_ in lines), b"")
        if header != self._header:
            if not self._replace and next(lines, None) is not None:
                raise UsageError(
                    f"{self.path} belongs to a job with another input, model or options (the batch size counts): run "
                    "that one to its end, or drop it, by deleting this file or with generate's --overwrite"
                )
            return
        for payload, good, chain in lines:
            try:
                entry = json.loads(payload)
                rows = {int(index): Completion(**row) for index, row in entry["rows"].items()}
                cost = GenerationStats(**entry["cost"])
            except (AttributeError, KeyError, TypeError, ValueError):
                return
            if rows.keys() & self.rows.keys():
                return
            self.rows.update(rows)
            self.costs.append(cost)
            self._good, self._chain = good, chain

    def add(self, indices: Sequence[int], rows: Sequence[Completion], cost: GenerationStats) -> None:
        """Append a finished batch (its items' indices, their completions, its cost), and flush it to the disk."""
        entry = {"rows": {i: asdict(row) for i, row in zip(indices, rows, strict=True)}, "cost": asdict(cost)}
        payload = json.dumps(entry, ensure_ascii=False).encode()
        lines, chain = b"", self._chain
        for part in [payload] if self._good else [self._header, payload]:
            chain = zlib.crc32(part, chain)
            lines += part + b" %08x\n" % chain
        if self._file is None:
            self._file = self.path.open("r+b" if self._good else "wb")
        with names_file(self.path):
            self._file.seek(self._good)
            self._file.truncate()
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        if not self._good:
            sync_folder(self.path.parent)
        self._good, self._chain = self._good + len(lines), chain
        self.rows.update(zip(indices, rows, strict=True))
        self.costs.append(cost)

    def finish(self, text: str) -> None:
        """Write the output, ``text``, unless a run that was killed after that has done so, and delete the journal.

        Raise FileError, and keep the finished batches, if another program has written the output meanwhile.
        """
        if not self.output.is_file() or self.output.read_bytes() != text.encode():
            self.check_output()
            write(self.output, text)
        if self._file:
            self._file.close()
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)


def _sealed(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (content, end offset, checksum so far) of each line of ``data`` up to the first with a wrong checksum."""
    end = chain = 0
    for line in io.BytesIO(data):
        payload, seal = line[:-10], line[-10:]
        chain = zlib.crc32(payload, chain)
        if seal != b" %08x\n" % chain:
            return
        end += len(line)
        yield payload, end, chain
