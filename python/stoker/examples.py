"""Reads text and JSONL files into examples, one per document.

Owns the rules of the input: what is one document, which keys a JSONL line may have, and the
sentences for lines that break them.  Must not know tokenizers or output files.

A file whose name ends in .jsonl or .ndjson is JSONL: one JSON object a line, blank lines skipped,
kinds mixed freely.  Any other file is plain text: the whole file is one document, kept as it is
(a UTF-8 byte order mark is dropped).  Everything is UTF-8.  Memory: the largest document.
"""

import json

from .errors import OperatingError, reason

JSONL_SUFFIXES = (".jsonl", ".ndjson")
KINDS = {  # the keys that make a kind, and the ones that may stand beside them
    "text": (("text",), ()),
    "completion": (("prompt", "completion"), ()),
    "chat": (("messages",), ("tools",)),
}
KINDS_SAID = 'expected {"text"}, {"prompt","completion"} or {"messages"}'


class Example:
    """One document.  where: 'file' or 'file:line', for messages.

    kind 'text': text.  kind 'completion': text (the prompt) and completion.
    kind 'chat': messages (a list of objects with a string `role`) and tools (None or a list).
    """

    __slots__ = ("kind", "where", "text", "completion", "messages", "tools")

    def __init__(self, kind, where, text=None, completion=None, messages=None, tools=None):
        self.kind = kind
        self.where = where
        self.text = text
        self.completion = completion
        self.messages = messages
        self.tools = tools


class ExampleReader:
    """Iterates over all files in order, as often as wanted.

    ignored: keys outside the known kinds -> lines that had them, of the last pass.
    empty: documents without any text, of the last pass; they are left out.
    """

    def __init__(self, paths):
        self.paths = paths
        self.ignored = {}
        self.empty = 0

    def __iter__(self):
        self.ignored = {}
        self.empty = 0
        for path in self.paths:
            if path.lower().endswith(JSONL_SUFFIXES):
                yield from self._lines(path)
            else:
                yield _whole_file(path)

    def _lines(self, path):
        try:
            with open(path, "rb") as source:
                for number, raw in enumerate(source, 1):
                    if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                        raw = raw[3:]
                    if not raw.strip():
                        continue
                    example = self._example(raw, "%s:%d" % (path, number))
                    if example is not None:
                        yield example
        except OSError as error:
            raise OperatingError("cannot read '%s': %s" % (path, reason(error)))

    def _example(self, raw, where):
        line = _parse(raw, where)
        kind = _kind(line, where)
        required, optional = KINDS[kind]
        for key in line:
            if key not in required and key not in optional:
                self.ignored[key] = self.ignored.get(key, 0) + 1
        if kind == "chat":
            tools = line.get("tools")
            if tools is not None and not isinstance(tools, list):
                raise OperatingError("%s: 'tools' is not a list" % where)
            return Example(kind, where, messages=_messages(line["messages"], where), tools=tools)
        for key in required:
            if not isinstance(line[key], str):
                raise OperatingError("%s: '%s' is not a string" % (where, key))
        if kind == "completion":
            if not line["completion"]:
                raise OperatingError(
                    "%s: 'completion' is empty, so the line has no target; remove the line" % where
                )
            return Example(kind, where, text=line["prompt"], completion=line["completion"])
        if not line["text"]:
            self.empty += 1
            return None
        return Example(kind, where, text=line["text"])


def _whole_file(path):
    try:
        with open(path, "rb") as source:
            raw = source.read()
    except OSError as error:
        raise OperatingError("cannot read '%s': %s" % (path, reason(error)))
    if not raw:
        raise OperatingError("'%s' is empty; remove it from the list of inputs" % path)
    try:
        return Example("text", path, text=raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise OperatingError(
            "'%s' is not UTF-8 text at byte %d; convert it first" % (path, error.start)
        )


def _no_duplicates(pairs):
    """A key given twice would silently lose its first value."""
    result = {}
    for key, value in pairs:
        if key in result:
            raise ValueError("key '%s' is given twice" % key)
        result[key] = value
    return result


def _parse(raw, where):
    try:
        line = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as error:
        raise OperatingError("%s: not UTF-8 at byte %d of the line" % (where, error.start))
    except json.JSONDecodeError as error:
        raise OperatingError("%s: not JSON: %s at column %d" % (where, error.msg, error.colno))
    except (ValueError, RecursionError) as error:
        raise OperatingError("%s: not usable JSON: %s" % (where, error))
    if not isinstance(line, dict):
        raise OperatingError("%s: not a JSON object; %s" % (where, KINDS_SAID))
    try:
        json.dumps(line, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise OperatingError("%s: holds half of a surrogate pair, which is no text" % where)
    return line


def _kind(line, where):
    owners = {key: kind for kind, (required, _) in KINDS.items() for key in required}
    kinds = sorted({owners[key] for key in line if key in owners})
    if not kinds:
        named = ", ".join("'%s'" % key for key in line) or "none"
        raise OperatingError("%s: no known key (keys here: %s); %s" % (where, named, KINDS_SAID))
    if len(kinds) > 1:
        raise OperatingError(
            "%s: keys of more than one kind (%s); %s"
            % (where, ", ".join("'%s'" % key for key in line if key in owners), KINDS_SAID)
        )
    missing = [key for key in KINDS[kinds[0]][0] if key not in line]
    if missing:
        raise OperatingError(
            "%s: key '%s' is missing (keys here: %s); %s"
            % (where, missing[0], ", ".join("'%s'" % key for key in line), KINDS_SAID)
        )
    return kinds[0]


def _messages(messages, where):
    if not isinstance(messages, list) or not messages:
        raise OperatingError("%s: 'messages' is not a list with at least one message" % where)
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise OperatingError(
                "%s: message %d is not an object with a string 'role'" % (where, number)
            )
        if "content" not in message and "tool_calls" not in message:
            raise OperatingError("%s: message %d has no 'content'" % (where, number))
    if not any(message["role"] == "assistant" for message in messages):
        raise OperatingError(
            "%s: no message has the role 'assistant', so the conversation has no target; remove "
            "the line" % where
        )
    return messages
