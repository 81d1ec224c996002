"""`stoker prepare`: text and JSONL files to a token file.

Owns the command line, the order of work and the summary.  Reading, tokenizing and writing are in
examples.py, tokenizer.py and tokenfile.py.  One pass over the inputs, one more in front of it when
a tokenizer is trained; memory holds a batch of documents, not the data.
"""

import argparse
import difflib
import os
import re

from .errors import OperatingError, UsageError
from .examples import ExampleReader
from .tokenfile import TokenSpool
from .tokenizer import open_tokenizer, train

BATCH_CHARACTERS = 4 << 20  # enough for the tokenizer's threads to be worth their start
BATCH_DOCUMENTS = 1024

EPILOG = """\
Inputs.  *.jsonl and *.ndjson: one object a line, {"text"}, {"prompt","completion"} (only the
completion is a target) or {"messages"} (rendered with the tokenizer's own chat template; only
assistant turns are targets).  Any other file: plain UTF-8 text, the whole file is one document.

Tokens.  A document begins with what the tokenizer itself puts in front and, unless it is a chat
(there the template decides), ends with the end-of-text token if the tokenizer has one.  `bytes`
needs no library: id = byte, 256 = end of document, vocabulary 257.
"""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError("%s; `stoker prepare --help` lists the options" % message)


def parser():
    p = Parser(
        prog="stoker prepare", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Turns text into a token file for `stoker train` and `stoker eval`.",
    )
    p.add_argument("inputs", nargs="*", metavar="TEXT-or-JSONL")
    p.add_argument("--tokenizer", metavar="DIR|bytes", help="folder with tokenizer.json, or bytes")
    p.add_argument("--out", metavar="F", help="token file to write (safetensors)")
    p.add_argument("--train-tokenizer", metavar="VOCAB", type=_count,
                   help="instead of --tokenizer: train byte-level BPE of that size on the inputs")
    p.add_argument("--out-tokenizer", metavar="DIR", help="where the trained tokenizer goes")
    p.add_argument("--holdout", metavar="FRACTION", type=_fraction,
                   help="put the last fraction of the tokens (whole documents if there are "
                        "several) into --holdout-out")
    p.add_argument("--holdout-out", metavar="F2", help="token file for the held-out part")
    return p


def _count(text):
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError("'%s' is not a whole number" % text)
    return int(text)


def _fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError("'%s' is not between 0 and 1" % text)
    return value


def parse(argv):
    p = parser()
    args, unknown = p.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        options = [o for action in p._actions for o in action.option_strings]
        near = difflib.get_close_matches(name, options, 1)
        raise UsageError("unknown option '%s'%s" % (name, "; did you mean %s?" % near[0]
                                                    if near else ""))
    if not args.inputs:
        raise UsageError("no input file; name at least one text or JSONL file")
    if args.train_tokenizer is None:
        if args.out_tokenizer:
            raise UsageError("--out-tokenizer needs --train-tokenizer VOCAB")
        if not args.tokenizer:
            raise UsageError("--tokenizer DIR or --tokenizer bytes is missing")
        if not args.out:
            raise UsageError("--out F is missing")
    else:
        if args.tokenizer:
            raise UsageError("--tokenizer and --train-tokenizer contradict each other; give one")
        if not args.out_tokenizer:
            raise UsageError("--train-tokenizer needs --out-tokenizer DIR")
    if (args.holdout is None) != (args.holdout_out is None):
        raise UsageError("--holdout FRACTION and --holdout-out F2 go together")
    if args.holdout_out and not args.out:
        raise UsageError("--holdout needs --out F")
    _check_paths(args)
    return args


def _check_paths(args):
    outputs = [os.path.realpath(p) for p in (args.out, args.holdout_out) if p]
    if len(set(outputs)) != len(outputs):
        raise UsageError("--out and --holdout-out name the same file '%s'" % args.out)
    for path in args.inputs:
        if os.path.realpath(path) in outputs:
            raise UsageError("'%s' is both an input and an output" % path)


def batches(examples):
    """Groups examples for the tokenizer; a document of any size is a batch of its own at worst."""
    batch, characters = [], 0
    for example in examples:
        size = len(example.text or "") + len(example.completion or "")
        if batch and (characters + size > BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS):
            yield batch
            batch, characters = [], 0
        batch.append(example)
        characters += size
    if batch:
        yield batch


class Encoder:
    """Examples to documents; looks the chat template up when the first chat comes."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._template = None

    def encode(self, batch):
        """Yields (ids, mask) for each example of the batch."""
        requests = [self._request(example) for example in batch]
        for example, (ids, mask) in zip(batch, self._tokenizer.encode(requests)):
            if example.kind != "text" and not any(mask):
                raise OperatingError(
                    "%s: no token of it is a target; does the tokenizer drop its text?"
                    % example.where
                )
            eos = self._tokenizer.eos_id
            if example.kind != "chat" and eos is not None and (not ids or ids[-1] != eos):
                ids, mask = list(ids) + [eos], bytes(mask) + b"\1"
            yield ids, mask

    def _request(self, example):
        if example.kind == "text":
            return example.text, None, True
        if example.kind == "completion":
            text = example.text + example.completion
            return text, [(len(example.text), len(text))], True
        if self._template is None:
            self._template = self._tokenizer.chat_template()
        text, spans = self._template.render(example)
        return text, spans, False  # the template writes the start token itself


def training_texts(reader):
    for example in reader:
        if example.kind == "chat":
            for message in example.messages:
                if isinstance(message.get("content"), str):
                    yield message["content"]
        else:
            yield example.text + (example.completion or "")


def run(argv):
    """The command.  Returns 0; raises UsageError or OperatingError."""
    args = parse(argv)
    reader = ExampleReader(args.inputs)
    source = args.tokenizer
    if args.train_tokenizer is not None:
        source = args.out_tokenizer
        train(training_texts(reader), args.train_tokenizer, source)
        print("tokenizer     %s" % source)
    tokenizer = open_tokenizer(source)
    if not args.out:
        print("vocabulary    %d" % tokenizer.vocabulary_size)
        return 0
    spool = TokenSpool(os.path.dirname(args.out) or ".", tokenizer.vocabulary_size)
    encoder = Encoder(tokenizer)
    for batch in batches(reader):
        for ids, mask in encoder.encode(batch):
            spool.add_document(ids, mask)
    if not spool.tokens:
        raise OperatingError("the inputs hold no text, so there is nothing to train on")
    write_outputs(args, spool, tokenizer)
    for key, lines in sorted(reader.ignored.items()):
        print("ignored       key '%s' on %d line(s)" % (key, lines))
    if reader.empty:
        print("left out      %d empty document(s)" % reader.empty)
    return 0


def write_outputs(args, spool, tokenizer):
    metadata = {"format": "stoker-tokens", "tokenizer": tokenizer.name,
                "vocabulary_size": str(tokenizer.vocabulary_size)}
    if tokenizer.eos_id is not None:
        metadata["eos_token_id"] = str(tokenizer.eos_id)
    outputs = [(args.out, 0, spool.tokens)]
    if args.holdout is not None:
        middle = spool.split_at(args.holdout)
        if not 0 < middle < spool.tokens:
            raise OperatingError(
                "--holdout %g of %d tokens leaves one side empty; give more text"
                % (args.holdout, spool.tokens)
            )
        outputs = [(args.out, 0, middle), (args.holdout_out, middle, spool.tokens)]
    print("vocabulary    %d%s" % (tokenizer.vocabulary_size, "" if tokenizer.eos_id is not None
                                  else " (no end-of-text token: documents only have offsets)"))
    for path, start, stop in outputs:
        done = spool.write(path, start, stop, metadata)
        print("%-13s %d document(s), %d tokens, %d targets, %.2f MB"
              % (path, done["documents"], done["tokens"], done["targets"], done["bytes"] / 1e6))
