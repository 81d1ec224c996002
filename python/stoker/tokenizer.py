"""Tokenizers: text with target spans to token ids with a mask.

Owns the two kinds (bytes, and a Hugging Face tokenizer folder) behind one interface, the training
of a new one, and where end-of-document tokens go.  Must not know input or output files.  The
`tokenizers` library is imported on first use.

Both kinds have: vocabulary_size; eos_id (None: the tokenizer has no end-of-document token);
name (for the token file's metadata); encode(batch) -> [(ids, mask), ...] for a list of
(text, spans, add_special), where spans are character ranges that are targets (None: all of it)
and add_special lets the tokenizer add what it puts at the start of a text.
"""

import json
import os

from . import chat
from .errors import OperatingError, UsageError, reason
from .tokenfile import write_atomically

BOS, EOS = "<|bos|>", "<|eos|>"
VOCABULARY_MIN = 256 + 2
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                 "mask_token")


class BytesTokenizer:
    """Token id = byte of the UTF-8 text; 256 = end of document; vocabulary 257."""

    name = "bytes"
    vocabulary_size = 257
    eos_id = 256

    def chat_template(self):
        raise OperatingError(
            "the tokenizer 'bytes' has no chat template, which {\"messages\"} data needs; use a "
            "tokenizer folder that has one"
        )

    def encode(self, batch):
        return [self._encode(text, spans) for text, spans, _ in batch]

    @staticmethod
    def _encode(text, spans):
        ids = text.encode("utf-8")
        if spans is None:
            return ids, b"\1" * len(ids)
        mask = bytearray(len(ids))
        for start, stop in spans:
            first = len(text[:start].encode("utf-8"))
            last = first + len(text[start:stop].encode("utf-8"))
            mask[first:last] = b"\1" * (last - first)
        return ids, mask


class FolderTokenizer:
    """A Hugging Face tokenizer folder: tokenizer.json, and tokenizer_config.json if it is there.

    Padding and truncation that tokenizer.json may ask for are switched off: they belong to
    batches, and would cut or pollute the data.
    """

    def __init__(self, folder):
        self.name = os.path.basename(os.path.abspath(folder))
        self.folder = folder
        path = os.path.join(folder, "tokenizer.json")
        if not os.path.isdir(folder):
            raise OperatingError("'%s' is neither a tokenizer folder nor the word 'bytes'" % folder)
        if not os.path.isfile(path):
            raise OperatingError(
                "'%s' has no tokenizer.json; save the tokenizer with transformers' "
                "save_pretrained, which writes one" % folder
            )
        library = import_tokenizers()
        try:
            self._tokenizer = library.Tokenizer.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise OperatingError("'%s' is not a tokenizer: %s" % (path, error))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config = _read_json(os.path.join(folder, "tokenizer_config.json"))
        self._special = self._special_tokens()
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab(True).values(), default=-1)
        self.eos_id = None
        eos = self._special.get("eos_token")
        if eos:
            self.eos_id = self._tokenizer.token_to_id(eos)
            if self.eos_id is None:
                raise OperatingError(
                    "'%s' names the end-of-text token '%s', which its tokenizer.json does not "
                    "have" % (folder, eos)
                )

    def _special_tokens(self):
        """From tokenizer_config.json, else special_tokens_map.json; a token is text or an object
        with `content`."""
        found = _read_json(os.path.join(self.folder, "special_tokens_map.json"))
        found.update({k: v for k, v in self._config.items() if v is not None})
        special = {}
        for name in SPECIAL_NAMES:
            token = found.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[name] = token
        return special

    def chat_template(self):
        found = chat.load_template(self.folder, self._config)
        if found is None:
            raise OperatingError(
                "'%s' has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json), which {\"messages\"} data needs; use the tokenizer of a "
                "chat model or add a template" % self.folder
            )
        return chat.ChatTemplate(found[0], self._special, found[1])

    def encode(self, batch):
        results = [None] * len(batch)
        for special in (False, True):
            places = [i for i, item in enumerate(batch) if item[2] == special]
            texts = [batch[i][0] for i in places]
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=special)
            for i, encoding in zip(places, encodings):
                results[i] = (encoding.ids, _mask(encoding, batch[i][1]))
        return results


def _mask(encoding, spans):
    """A token is a target when any of its characters lies in a span.

    So a token that reaches from a prompt into its completion is a target.  A token that stands for
    no text of the example (an added start token) is at (0, 0) and so in no span.
    """
    if spans is None:
        return b"\1" * len(encoding.ids)
    mask = bytearray(len(encoding.ids))
    for i, (start, stop) in enumerate(encoding.offsets):
        if start == stop:  # white space whose place a byte-level tokenizer trimmed to its end
            start = stop - 1
        mask[i] = any(start < last and stop > first for first, last in spans)
    return mask


def open_tokenizer(name):
    """'bytes' or a tokenizer folder."""
    return BytesTokenizer() if name == "bytes" else FolderTokenizer(name)


def train(texts, vocabulary_size, folder):
    """Trains byte-level BPE on the texts and writes a tokenizer folder.

    Ids 0 and 1 are the start and end tokens, then the 256 bytes, then merges.  A text gets the
    start token in front.  With little text the vocabulary ends smaller than asked.
    """
    if vocabulary_size < VOCABULARY_MIN:
        raise UsageError(
            "--train-tokenizer %d: a byte-level vocabulary has at least %d entries (256 bytes, "
            "start and end of text)" % (vocabulary_size, VOCABULARY_MIN)
        )
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        raise OperatingError(
            "'%s' already holds a tokenizer; name another folder with --out-tokenizer or remove "
            "it" % folder
        )
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=[BOS, EOS], show_progress=False,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=BOS + " $A", pair="%s $A %s $B:1" % (BOS, BOS), special_tokens=[(BOS, 0)],
    )
    special = {"bos_token": BOS, "eos_token": EOS}
    config = dict(special, tokenizer_class="PreTrainedTokenizerFast",
                  clean_up_tokenization_spaces=False, model_max_length=10 ** 9)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OperatingError("cannot create '%s': %s" % (folder, reason(error)))
    _write_json(folder, "special_tokens_map.json", special)
    _write_json(folder, "tokenizer_config.json", config)
    # tokenizer.json last: it is what makes the folder a tokenizer.
    _write_text(folder, "tokenizer.json", tokenizer.to_str(pretty=True))


def import_tokenizers():
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, processors, trainers  # noqa: F401
    except ImportError:
        raise OperatingError(
            "a tokenizer folder needs the Python package tokenizers, which is not installed: pip "
            "install tokenizers, or use --tokenizer bytes"
        )
    return tokenizers


def _read_json(path):
    """The object in a file; empty when there is no such file."""
    try:
        with open(path, encoding="utf-8") as source:
            found = json.load(source)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise OperatingError("cannot read '%s': %s" % (path, reason(error)))
    except ValueError as error:
        raise OperatingError("'%s' is not JSON: %s" % (path, error))
    if not isinstance(found, dict):
        raise OperatingError("'%s' is not a JSON object" % path)
    return found


def _write_json(folder, name, value):
    _write_text(folder, name, json.dumps(value, indent=2) + "\n")


def _write_text(folder, name, text):
    write_atomically(os.path.join(folder, name), lambda out: out.write(text.encode("utf-8")))
