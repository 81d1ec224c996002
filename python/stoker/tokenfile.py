"""Token files: the safetensors file that `stoker train --data` and `stoker eval --data` read.

Owns the layout and the guarantee that a file under its final name is complete.  Must not know
where the tokens come from.

    input_ids         U16 if the vocabulary has at most 65,536 entries, else I32   [tokens]
    loss_mask         U8, 1 = this token is a target; left out when every token is [tokens]
    document_offsets  I64, index of each document's first token; the first is 0;
                      left out when there is one document                          [documents]

Format (safetensors): 8 bytes little-endian header length, a JSON header padded with spaces to a
multiple of 8, then the tensors without gaps.  Tensors are stored widest element first, so each is
aligned to its element size.

Tokens wait in unnamed temporary files beside the output until the totals are known, so memory
does not grow with the data (8 bytes per document do).  The final file is written under a
temporary name in the same folder, flushed to the device, then renamed.
"""

import array
import json
import os
import sys
import tempfile

from .errors import OperatingError, reason

COPY_BYTES = 1 << 20
U16_VOCABULARY_MAX = 1 << 16


def _typecode(size_bytes):
    """The `array` code of a signed integer of that size here; sizes vary with the platform."""
    for code in "hilq":
        if array.array(code).itemsize == size_bytes:
            return code
    raise AssertionError("no integer of %d bytes" % size_bytes)


def _little_endian(values):
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


class TokenSpool:
    """Collects documents; `write` then puts a range of them into a token file.

    vocabulary_size decides the integer type and is checked for each token.  folder is where the
    temporary files live: the output's own, so that a full disk shows there.
    """

    def __init__(self, folder, vocabulary_size):
        self.vocabulary_size = vocabulary_size
        self.tokens = 0
        self.offsets = array.array("q")
        self._code = "H" if vocabulary_size <= U16_VOCABULARY_MAX else _typecode(4)
        self._itemsize = array.array(self._code).itemsize
        try:
            self._ids = tempfile.TemporaryFile(dir=folder)
            self._mask = tempfile.TemporaryFile(dir=folder)
        except OSError as error:
            raise OperatingError(
                "cannot create a temporary file in '%s': %s; name an output in a folder that "
                "exists and is writable" % (folder, reason(error))
            )

    def add_document(self, ids, targets):
        """ids: integers; targets: as many 0/1 bytes.  A document without tokens is not added."""
        assert len(ids) == len(targets)
        if not ids:
            return
        if min(ids) < 0 or max(ids) >= self.vocabulary_size:
            raise OperatingError(
                "the tokenizer gave token id %d, outside its own vocabulary of %d entries; its "
                "files contradict each other" % (max(ids), self.vocabulary_size)
            )
        try:
            self._ids.write(_little_endian(array.array(self._code, ids)))
            self._mask.write(bytes(targets))
        except OSError as error:
            raise OperatingError("cannot write temporary token data: %s" % reason(error))
        self.offsets.append(self.tokens)
        self.tokens += len(ids)

    def split_at(self, fraction):
        """Token index where the last `fraction` of the tokens begins.

        With several documents: the document boundary nearest to it, never the first or the end.
        """
        wanted = round(self.tokens * (1.0 - fraction))
        if len(self.offsets) > 1:
            return min(self.offsets[1:], key=lambda start: abs(start - wanted))
        return wanted

    def write(self, path, start, stop, metadata):
        """Writes tokens [start, stop) to `path`; returns {documents, tokens, targets, bytes}."""
        offsets = array.array("q", [0])
        offsets.extend(o - start for o in self.offsets if start < o < stop)
        targets, all_targets = self._count_targets(start, stop, offsets)
        pieces = []
        if len(offsets) > 1:
            pieces.append(("document_offsets", "I64", len(offsets), _little_endian(offsets)))
        dtype = "U16" if self._itemsize == 2 else "I32"
        pieces.append(("input_ids", dtype, stop - start, (self._ids, self._itemsize)))
        if not all_targets:
            pieces.append(("loss_mask", "U8", stop - start, (self._mask, 1)))
        size_bytes = self._write_file(path, start, stop, pieces, metadata)
        return {
            "documents": len(offsets),
            "tokens": stop - start,
            "targets": targets,
            "bytes": size_bytes,
        }

    def _count_targets(self, start, stop, offsets):
        """Targets as the trainer counts them: the first token of a document is none."""
        ones = sum(block.count(1) for block in self._blocks(self._mask, 1, start, stop))
        first = 0
        for offset in offsets:
            self._mask.seek(start + offset)
            first += self._mask.read(1) == b"\1"
        return ones - first, ones == stop - start

    @staticmethod
    def _blocks(spool, itemsize, start, stop):
        spool.seek(start * itemsize)
        left = (stop - start) * itemsize
        while left:
            block = spool.read(min(left, COPY_BYTES))
            if not block:
                raise OperatingError("temporary token data ended early; is the disk full?")
            left -= len(block)
            yield block

    def _write_file(self, path, start, stop, pieces, metadata):
        header, end = {"__metadata__": metadata}, 0
        for name, dtype, count, _ in pieces:
            size = count * {"I64": 8, "I32": 4, "U16": 2, "U8": 1}[dtype]
            header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header, separators=(",", ":")).encode("ascii")
        text += b" " * (-len(text) % 8)

        def fill(out):
            out.write(len(text).to_bytes(8, "little"))
            out.write(text)
            for _, _, _, data in pieces:
                if isinstance(data, bytes):
                    out.write(data)
                else:
                    for block in self._blocks(data[0], data[1], start, stop):
                        out.write(block)

        write_atomically(path, fill)
        return 8 + len(text) + end


def write_atomically(path, fill):
    """Calls fill(file) on a temporary file beside `path`, flushes it, renames it to `path`.

    Under `path` there is the old content or the whole new one; on any failure the old one, and
    the temporary file is removed.
    """
    folder = os.path.dirname(path) or "."
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=os.path.basename(path) + ".", suffix=".part",
                                             dir=folder)
        with os.fdopen(handle, "wb") as out:
            fill(out)
            out.flush()
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(out.fileno(), 0o666 & ~mask)  # mkstemp made it private
            os.fsync(out.fileno())
        os.replace(temporary, path)
        temporary = None
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)  # without it the name may be lost with the power
        finally:
            os.close(directory)
    except OSError as error:
        raise OperatingError("cannot write '%s': %s" % (path, reason(error)))
    finally:
        if temporary is not None:
            os.unlink(temporary)
