"""Chat templates: a conversation to text, and which characters of it the assistant wrote.

Owns template lookup, the jinja2 environment (the names that templates on Hugging Face expect) and
the search for assistant spans.  Must not know tokens.  jinja2 is imported on first use.

Spans are found in one of two ways:
  1. The template has {% generation %} blocks: what they print is the assistant's.
  2. Otherwise the conversation is rendered up to each assistant message, with the generation
     prompt, and up to and including it.  Both must be prefixes of the whole rendering; the text
     between their ends is the assistant's (its end-of-turn marker included).  A template that
     rewrites earlier turns (dropping old reasoning, say) fails that check and is refused, because
     a guess would put the wrong tokens under the loss.
"""

import datetime
import json
import os

from .errors import OperatingError, reason

# Private-use characters stand around generation blocks while rendering and are then removed.
MARK_OPEN, MARK_CLOSE = "\uf8f1\uf8f2", "\uf8f2\uf8f1"


class ChatTemplate:
    """special_tokens: what the template sees as bos_token, eos_token, ...; where: for messages."""

    def __init__(self, source, special_tokens, where):
        self.where = where
        self._special = special_tokens
        self._jinja2 = _import_jinja2()
        self._marked = False
        environment = self._environment()
        try:
            self._template = environment.from_string(source)
        except self._jinja2.TemplateError as error:
            raise OperatingError("the chat template in '%s' is not valid: %s" % (where, error))
        if MARK_OPEN in source or MARK_CLOSE in source:
            raise OperatingError(
                "the chat template in '%s' uses the private characters U+F8F1 U+F8F2" % where
            )

    def render(self, example):
        """Returns (text, [(start, stop), ...]): spans of characters that are targets."""
        if self._marked:
            return self._render_marked(example)
        return self._render_prefixes(example)

    def _environment(self):
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self

        class Generation(Extension):
            tags = {"generation"}

            def parse(self, parser):
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                template._marked = True
                call = self.call_method("_mark", [])
                return nodes.CallBlock(call, [], [], body).set_lineno(line)

            def _mark(self, caller):
                return MARK_OPEN + caller() + MARK_CLOSE

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._raise
        environment.globals["strftime_now"] = lambda f: datetime.datetime.now().strftime(f)
        return environment

    def _raise(self, message):
        raise self._jinja2.TemplateError(message)

    def _text(self, example, count, prompt):
        try:
            return self._template.render(
                messages=example.messages[:count], tools=example.tools, documents=None,
                add_generation_prompt=prompt, **self._special
            )
        except self._jinja2.TemplateError as error:
            said = error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            said = "%s: %s" % (type(error).__name__, error)
        raise OperatingError(
            "%s: the chat template in '%s' refuses the first %d message(s): %s"
            % (example.where, self.where, count, said)
        )

    def _render_marked(self, example):
        spoken = json.dumps([example.messages, example.tools], ensure_ascii=False)
        if MARK_OPEN in spoken or MARK_CLOSE in spoken:
            raise OperatingError(
                "%s: a message holds the private characters U+F8F1 U+F8F2, which mark the "
                "assistant's text while rendering" % example.where
            )
        marked = self._text(example, len(example.messages), False)
        text, spans, length = [], [], 0
        pieces = marked.split(MARK_OPEN)
        text.append(pieces[0])
        length += len(pieces[0])
        for piece in pieces[1:]:
            inside, close, after = piece.partition(MARK_CLOSE)
            if not close:
                raise OperatingError(
                    "%s: the chat template in '%s' nests generation blocks"
                    % (example.where, self.where)
                )
            if inside:
                spans.append((length, length + len(inside)))
            text += [inside, after]
            length += len(inside) + len(after)
        if not spans:
            raise OperatingError(
                "%s: the chat template's generation blocks printed nothing, so the conversation "
                "has no target" % example.where
            )
        return "".join(text), spans

    def _render_prefixes(self, example):
        messages = example.messages
        whole = self._text(example, len(messages), False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(example, number, True) if number else ""
            upto = self._text(example, number + 1, False)
            if not (whole.startswith(before) and whole.startswith(upto)
                    and len(before) < len(upto)):
                raise OperatingError(
                    "%s: the chat template in '%s' renders message %d differently when others "
                    "follow or when it is asked for, so the assistant's text cannot be told "
                    "apart; put {%% generation %%} ... {%% endgeneration %%} around it in the "
                    "template" % (example.where, self.where, number)
                )
            spans.append((len(before), len(upto)))
        return whole, spans


def load_template(folder, config):
    """The template source of a tokenizer folder as (source, file name), or None.

    chat_template.jinja wins over `chat_template` in tokenizer_config.json, as in transformers; of
    several named ones `default` is taken.
    """
    path = os.path.join(folder, "chat_template.jinja")
    try:
        with open(path, encoding="utf-8") as source:
            return source.read(), path
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        said = reason(error) if isinstance(error, OSError) else "not UTF-8"
        raise OperatingError("cannot read '%s': %s" % (path, said))
    found = config.get("chat_template")
    path = os.path.join(folder, "tokenizer_config.json")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise OperatingError("'%s': 'chat_template' is neither text nor a list of them" % path)
    return None if found is None else (found, path)


def _import_jinja2():
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise OperatingError(
            "chat data needs the Python package jinja2, which is not installed: pip install jinja2"
        )
    return jinja2


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """jinja2's own filter escapes for HTML, which would change the text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)
