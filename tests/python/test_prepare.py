#!/usr/bin/env python3
"""Tests of `python3 -m stoker prepare`, run as a command, as `stoker prepare` runs it.

Prints TAP.  Tests that need tokenizers or jinja2 are skipped where those are missing.  Everything
happens in a temporary folder; nothing is timed or random.
"""

import array
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGE = os.path.join(ROOT, "python")
sys.path.insert(0, PACKAGE)

CODES = {"U8": "B", "U16": "H", "I32": "i", "I64": "q"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)
CHAT = {"messages": [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "two plus two \U0001f600"},
    {"role": "assistant", "content": "four, caf\u00e9"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "welcome"},
]}
CORPUS = ["the quick brown fox jumps over the lazy dog, four times four is more than welcome. "
          "caf\u00e9 \U0001f600\n" * 20]


class Skip(Exception):
    pass


def need(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Skip("%s is not installed" % module)


def prepare(*args):
    """Runs the command; returns (exit code, standard output, standard error)."""
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "prepare"] + [str(a) for a in args],
        env=dict(os.environ, PYTHONPATH=PACKAGE), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    return done.returncode, done.stdout, done.stderr


def good(*args):
    code, out, err = prepare(*args)
    assert code == 0 and not err, (code, out, err)
    return out


def refused(code, *args, says):
    got, out, err = prepare(*args)
    assert got == code, (got, out, err)
    assert err.count("\n") == 1, err  # one sentence
    for words in says:
        assert words in err, (words, err)


def put(name, content):
    if isinstance(content, list):  # JSONL
        content = "".join((c if isinstance(c, str) else json.dumps(c)) + "\n" for c in content)
    with open(name, "wb") as out:
        out.write(content if isinstance(content, bytes) else content.encode("utf-8"))
    return name


def read(path):
    """{tensor: (dtype, values)}; checks the layout that safetensors asks for."""
    with open(path, "rb") as source:
        raw = source.read()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    assert size % 8 == 0
    assert header.pop("__metadata__")["format"] == "stoker-tokens"
    tensors, end = {}, 0
    for name, about in header.items():
        start, stop = about["data_offsets"]
        assert start == end, "a gap"
        end = stop
        values = array.array(CODES[about["dtype"]])
        assert start % values.itemsize == 0, "unaligned"
        values.frombytes(raw[8 + size + start:8 + size + stop])
        assert about["shape"] == [len(values)]
        tensors[name] = (about["dtype"], list(values))
    assert 8 + size + end == len(raw)
    return tensors


def tokenizer(folder, template=None, vocabulary=300):
    """A folder with a small byte-level BPE; the special tokens of ChatML only with a template."""
    need("tokenizers")
    from stoker.tokenizer import train

    train(CORPUS, vocabulary, folder)
    if template is not None:
        import tokenizers

        path = os.path.join(folder, "tokenizer.json")
        t = tokenizers.Tokenizer.from_file(path)
        t.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        t.enable_truncation(4)  # must not reach the data
        t.enable_padding(length=64)
        t.save(path)
        put(os.path.join(folder, "chat_template.jinja"), template)
    return folder


def decoded(folder, ids):
    import tokenizers

    path = os.path.join(folder, "tokenizer.json")
    return tokenizers.Tokenizer.from_file(path).decode(ids, skip_special_tokens=False)


def masked_text(folder, tensors):
    """Runs of target tokens, decoded."""
    runs, previous = [], 0
    for token, target in zip(tensors["input_ids"][1], tensors["loss_mask"][1]):
        if target and not previous:
            runs.append([])
        if target:
            runs[-1].append(token)
        previous = target
    return [decoded(folder, run) for run in runs]


def test_bytes_one_text_file():
    put("a.txt", "h\u00e9llo\r\n")
    out = good("a.txt", "--tokenizer", "bytes", "--out", "o")
    assert read("o") == {"input_ids": ("U16", list("h\u00e9llo\r\n".encode()) + [256])}
    assert "1 document(s), 9 tokens, 8 targets" in out and "vocabulary    257" in out, out


def test_bytes_several_documents():
    put("a.txt", "ab")
    put("b.jsonl", [{"text": "c"}, "", {"text": ""}, {"text": "de"}])
    out = good("a.txt", "b.jsonl", "--tokenizer", "bytes", "--out", "o")
    tensors = read("o")
    assert tensors["input_ids"][1] == [97, 98, 256, 99, 256, 100, 101, 256]
    assert tensors["document_offsets"] == ("I64", [0, 3, 5])
    assert "loss_mask" not in tensors
    assert "3 document(s), 8 tokens, 5 targets" in out and "1 empty document" in out, out


def test_bytes_prompt_completion_mask():
    put("a.jsonl", [{"prompt": "\u00e9?", "completion": "\u00fc!"}, {"text": "x"}])
    out = good("a.jsonl", "--tokenizer", "bytes", "--out", "o")
    tensors = read("o")
    assert tensors["input_ids"][1] == list("\u00e9?\u00fc!".encode()) + [256, 120, 256]
    assert tensors["loss_mask"] == ("U8", [0, 0, 0, 1, 1, 1, 1, 1, 1])
    assert "5 targets" in out, out  # the first token of the second document is none


def test_same_input_same_bytes():
    put("a.jsonl", [{"prompt": "p", "completion": "c"}, {"text": "x"}])
    for name in ("o1", "o2"):
        good("a.jsonl", "--tokenizer", "bytes", "--out", name)
    with open("o1", "rb") as one, open("o2", "rb") as two:
        assert one.read() == two.read()


def test_holdout_cuts_between_documents():
    put("a.jsonl", [{"prompt": "pp", "completion": "abcdef"}] + [{"text": "0123456"}] * 3)
    good("a.jsonl", "--tokenizer", "bytes", "--out", "o", "--holdout", "0.3", "--holdout-out", "h")
    train, held = read("o"), read("h")
    assert train["document_offsets"][1] == [0, 9, 17]
    assert train["loss_mask"][1][:3] == [0, 0, 1] and len(train["loss_mask"][1]) == 25
    assert held == {"input_ids": ("U16", list(b"0123456") + [256])}  # no mask, one document


def test_holdout_cuts_one_document_anywhere():
    put("a.txt", "0123456789")
    good("a.txt", "--tokenizer", "bytes", "--out", "o", "--holdout", "0.2", "--holdout-out", "h")
    assert read("o")["input_ids"][1] == list(b"012345678")
    assert read("h")["input_ids"][1] == [57, 256]
    put("b.txt", "a")
    refused(1, "b.txt", "--tokenizer", "bytes", "--out", "o", "--holdout", "0.1",
            "--holdout-out", "h2", says=["--holdout 0.1 of 2 tokens"])
    assert not os.path.exists("h2")


def test_train_tokenizer_then_use_it():
    need("tokenizers")
    put("a.txt", CORPUS[0])
    good("a.txt", "--train-tokenizer", "300", "--out-tokenizer", "tok", "--out", "o")
    assert sorted(os.listdir("tok")) == ["special_tokens_map.json", "tokenizer.json",
                                         "tokenizer_config.json"]
    with open("tok/tokenizer_config.json") as source:
        config = json.load(source)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["bos_token"] == "<|bos|>" and config["eos_token"] == "<|eos|>"
    dtype, ids = read("o")["input_ids"]
    assert dtype == "U16" and ids[0] == 0 and ids[-1] == 1 and max(ids) < 300
    assert decoded("tok", ids[1:-1]) == CORPUS[0]
    good("a.txt", "--tokenizer", "tok", "--out", "again")
    assert read("again") == read("o")
    refused(1, "a.txt", "--train-tokenizer", "300", "--out-tokenizer", "tok",
            says=["'tok' already holds a tokenizer"])
    refused(2, "a.txt", "--train-tokenizer", "99", "--out-tokenizer", "t2", says=["at least 258"])


def test_large_vocabulary_is_i32():
    need("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    os.mkdir("tok")
    t = Tokenizer(models.WordLevel({"a": 0, "b": 70000, "?": 1}, unk_token="?"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.save("tok/tokenizer.json")
    out = good(put("a.txt", "b a b"), "--tokenizer", "tok", "--out", "o")
    assert read("o")["input_ids"] == ("I32", [70000, 0, 70000])
    assert "no end-of-text token" in out and "70001" in out, out


def test_completion_mask_with_a_tokenizer():
    folder = tokenizer("tok")
    put("a.jsonl", [{"prompt": "the quick", "completion": " brown fox \U0001f600"}])
    good("a.jsonl", "--tokenizer", folder, "--out", "o")
    tensors = read("o")
    assert tensors["input_ids"][1][0] == 0 and tensors["loss_mask"][1][0] == 0  # start token
    assert masked_text(folder, tensors) == [" brown fox \U0001f600<|eos|>"]


def test_chat_mask_by_prefixes():
    need("tokenizers", "jinja2")
    folder = tokenizer("tok", CHATML)
    good(put("a.jsonl", [CHAT]), "--tokenizer", folder, "--out", "o")
    tensors = read("o")
    assert masked_text(folder, tensors) == ["four, caf\u00e9<|im_end|>\n", "welcome<|im_end|>\n"]
    text = decoded(folder, tensors["input_ids"][1])
    assert text.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\ntwo plus")
    assert text.endswith("welcome<|im_end|>\n") and "document_offsets" not in tensors


def test_chat_mask_by_generation_blocks():
    need("tokenizers", "jinja2")
    folder = tokenizer("tok", CHATML_MARKED)
    good(put("a.jsonl", [CHAT, {"text": "the dog"}]), "--tokenizer", folder, "--out", "o")
    tensors = read("o")
    start = tensors["document_offsets"][1][1]
    assert masked_text(folder, {k: (v[0], v[1][:start]) for k, v in tensors.items()}) == [
        "four, caf\u00e9<|im_end|>", "welcome<|im_end|>"]
    assert all(tensors["loss_mask"][1][start:])
    assert "\uf8f1" not in decoded(folder, tensors["input_ids"][1])


def test_chat_template_in_config_and_special_tokens():
    need("tokenizers", "jinja2")
    folder = tokenizer("tok")
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path) as source:
        config = json.load(source)
    config["eos_token"] = {"content": "<|eos|>", "special": True}
    template = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
                " {{ m.content }}{{ eos_token }}{% else %}{{ m.content }}:{% endif %}{% endfor %}")
    config["chat_template"] = [{"name": "other", "template": "{{"},
                               {"name": "default", "template": template}]
    put(path, json.dumps(config))
    good(put("a.jsonl", [CHAT]), "--tokenizer", folder, "--out", "o")
    tensors = read("o")
    assert tensors["input_ids"][1].count(0) == 1  # one start token: the template's
    assert masked_text(folder, tensors) == [" four, caf\u00e9<|eos|>", " welcome<|eos|>"]


def test_chat_template_that_rewrites_history_is_refused():
    need("tokenizers", "jinja2")
    folder = tokenizer("tok", "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last or "
                       "m.role != 'assistant' %}{{ m.content }}{% else %}{{ m.content[:2] }}"
                       "{% endif %}<|im_end|>{% endfor %}")
    refused(1, put("a.jsonl", [CHAT]), "--tokenizer", folder, "--out", "o",
            says=["a.jsonl:1", "message 2", "{% generation %}"])
    silent = tokenizer("t2", "{% for m in messages %}{% if m.role != 'assistant' or loop.index > 4 "
                       "%}<|im_start|>{{ m.content }}{% endif %}{% endfor %}")
    refused(1, "a.jsonl", "--tokenizer", silent, "--out", "o", says=["a.jsonl:1", "message 2"])
    assert not os.path.exists("o")


def test_chat_refusals():
    put("a.jsonl", [{"text": "x"}, CHAT])
    refused(1, "a.jsonl", "--tokenizer", "bytes", "--out", "o", says=["bytes", "chat template"])
    need("tokenizers", "jinja2")
    refused(1, "a.jsonl", "--tokenizer", tokenizer("t1"), "--out", "o",
            says=["has no chat template"])
    raising = tokenizer("t2", "{{ raise_exception('roles must alternate') }}")
    refused(1, "a.jsonl", "--tokenizer", raising, "--out", "o",
            says=["a.jsonl:2", "roles must alternate"])
    refused(1, "a.jsonl", "--tokenizer", tokenizer("t3", "{% for %}"), "--out", "o",
            says=["chat template", "not valid"])
    put("b.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    refused(1, "b.jsonl", "--tokenizer", raising, "--out", "o", says=["b.jsonl:1", "assistant"])
    put("c.jsonl", [{"messages": [{"content": "hi"}]}])
    refused(1, "c.jsonl", "--tokenizer", raising, "--out", "o", says=["c.jsonl:1", "'role'"])
    assert not os.path.exists("o")


def test_malformed_lines_name_file_and_line():
    good_line = {"text": "x"}
    for bad, words in (
        ('{"text": "x"', "not JSON"),
        ("[1]", "not a JSON object"),
        ('"x"', "not a JSON object"),
        ('{"texts": "x", "id": 1}', "'texts', 'id'"),
        ('{"prompt": "x", "completions": "y"}', "'completion' is missing"),
        ('{"text": 3}', "'text' is not a string"),
        ('{"text": null}', "'text' is not a string"),
        ('{"text": "x", "text": "y"}', "given twice"),
        ('{"text": "x", "messages": []}', "more than one kind"),
        ('{"prompt": "x", "completion": ""}', "'completion' is empty"),
        ('{"messages": []}', "at least one message"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100000, "not usable JSON"),
    ):
        put("a.jsonl", [good_line, "", bad])
        refused(1, "a.jsonl", "--tokenizer", "bytes", "--out", "o", says=["a.jsonl:3", words])
    put("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n')
    refused(1, "a.jsonl", "--tokenizer", "bytes", "--out", "o", says=["a.jsonl:2", "UTF-8"])
    put("a.txt", b"abc\xff")
    refused(1, "a.txt", "--tokenizer", "bytes", "--out", "o", says=["a.txt", "byte 3"])
    assert not os.path.exists("o")


def test_extra_keys_are_named():
    put("a.jsonl", [{"text": "x", "id": 1}, {"text": "y", "id": 2, "source": "z"}])
    out = good("a.jsonl", "--tokenizer", "bytes", "--out", "o")
    assert "key 'id' on 2 line(s)" in out and "key 'source' on 1 line(s)" in out, out


def test_empty_data():
    for name, content in (("a.txt", ""), ("a.jsonl", "\n\n"), ("b.jsonl", '{"text": ""}\n')):
        put(name, content)
        refused(1, name, "--tokenizer", "bytes", "--out", "o", says=["empty" if name == "a.txt"
                                                                     else "no text"])
    assert not os.path.exists("o")


def test_bad_use():
    put("a.txt", "x")
    tok = ["--tokenizer", "bytes"]
    for args, words in (
        ([], "no input file"),
        (["a.txt", "--out", "o"], "--tokenizer"),
        (["a.txt"] + tok, "--out F is missing"),
        (["a.txt", "--out", "o", "--tokeniser", "bytes"], "did you mean --tokenizer"),
        (["a.txt", "--out", "o", "--train-tokenizer", "300"] + tok, "contradict"),
        (["a.txt", "--out", "o", "--train-tokenizer", "300"], "--out-tokenizer"),
        (["a.txt", "--out", "o", "--out-tokenizer", "t"] + tok, "--train-tokenizer"),
        (["a.txt", "--out", "o", "--train-tokenizer", "3x", "--out-tokenizer", "t"], "3x"),
        (["a.txt", "--out", "o", "--holdout", "0.1"] + tok, "go together"),
        (["a.txt", "--out", "o", "--holdout", "1.5", "--holdout-out", "h"] + tok, "1.5"),
        (["a.txt", "--out", "o", "--holdout", "0.1", "--holdout-out", "./o"] + tok, "same file"),
        (["a.txt", "--out", "./a.txt"] + tok, "both an input and an output"),
    ):
        refused(2, *args, says=[words])
    assert sorted(os.listdir(".")) == ["a.txt"]


def test_missing_files():
    refused(1, "no.txt", "--tokenizer", "bytes", "--out", "o", says=["no.txt", "No such file"])
    put("a.txt", "x")
    refused(1, "a.txt", "--tokenizer", "nowhere", "--out", "o", says=["'nowhere'", "bytes"])
    os.mkdir("hollow")
    refused(1, "a.txt", "--tokenizer", "hollow", "--out", "o", says=["no tokenizer.json"])
    refused(1, "a.txt", "--tokenizer", "bytes", "--out", "no/o", says=["'no'"])
    os.mkdir("folder")
    refused(1, "a.txt", "--tokenizer", "bytes", "--out", "folder", says=["'folder'"])
    assert sorted(os.listdir(".")) == ["a.txt", "folder", "hollow"]


def test_tokenizer_folder_that_lies():
    folder = tokenizer("tok")
    put("a.txt", "x")
    path = os.path.join(folder, "tokenizer_config.json")
    put(path, '{"eos_token": "</s>"}')
    refused(1, "a.txt", "--tokenizer", folder, "--out", "o", says=["'</s>'"])
    put(path, "{")
    refused(1, "a.txt", "--tokenizer", folder, "--out", "o", says=["tokenizer_config.json"])
    put(os.path.join(folder, "tokenizer.json"), "{}")
    refused(1, "a.txt", "--tokenizer", folder, "--out", "o", says=["is not a tokenizer"])


def test_failed_write_keeps_the_old_file():
    from stoker.errors import OperatingError
    from stoker.tokenfile import write_atomically

    put("o", "old")

    def full(out):
        out.write(b"new")
        raise OSError(28, "No space left on device")

    try:
        write_atomically("o", full)
        raise AssertionError("no error")
    except OperatingError as error:
        assert "'o'" in str(error) and "No space" in str(error)
    assert os.listdir(".") == ["o"]
    with open("o") as source:
        assert source.read() == "old"
    write_atomically("o", lambda out: out.write(b"new"))
    assert os.listdir(".") == ["o"]
    mask = os.umask(0)
    os.umask(mask)
    assert os.stat("o").st_mode & 0o777 == 0o666 & ~mask


def test_name_appears_only_when_complete():
    """Looked at from inside the write: nothing under the final name, part of it beside."""
    from stoker.tokenfile import write_atomically

    seen = []

    def fill(out):
        out.write(b"x")
        seen.extend(os.listdir("."))

    write_atomically("o", fill)
    assert len(seen) == 1 and seen[0].startswith("o.") and seen[0].endswith(".part"), seen


def test_spool_copies_across_blocks():
    from stoker import tokenfile

    tokenfile.COPY_BYTES, before = 7, tokenfile.COPY_BYTES
    try:
        spool = tokenfile.TokenSpool(".", 70000)
        for n in range(1, 40):
            spool.add_document([n * 1000] * n, bytes([1] * (n - 1) + [0]))
        done = spool.write("o", 0, spool.tokens, {"format": "stoker-tokens"})
    finally:
        tokenfile.COPY_BYTES = before
    tensors = read("o")
    assert tensors["input_ids"] == ("I32", [n * 1000 for n in range(1, 40) for _ in range(n)])
    assert sum(tensors["loss_mask"][1]) == sum(range(39))
    assert done["documents"] == 39 and done["tokens"] == 780
    assert done["targets"] == sum(n - 2 for n in range(2, 40))  # neither first nor last


def test_library_is_not_needed_for_bytes():
    """`--tokenizer bytes` works where tokenizers and jinja2 cannot be imported."""
    put("a.txt", "x")
    put("block.py", "import sys\nsys.modules['tokenizers'] = sys.modules['jinja2'] = None\n"
        "sys.argv = ['stoker'] + sys.argv[1:]\nfrom stoker.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n")

    def blocked(*args):
        return subprocess.run([sys.executable, "block.py", "prepare"] + list(args),
                              env=dict(os.environ, PYTHONPATH=PACKAGE), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True)

    assert blocked("a.txt", "--tokenizer", "bytes", "--out", "o").returncode == 0
    os.mkdir("tok")
    put("tok/tokenizer.json", "{}")
    done = blocked("a.txt", "--tokenizer", "tok", "--out", "o2")
    assert done.returncode == 1 and "pip install tokenizers" in done.stderr, done.stderr


def main():
    tests = [(n[5:], f) for n, f in sorted(globals().items()) if n.startswith("test_")]
    failed = 0
    print("1..%d" % len(tests))
    for number, (name, test) in enumerate(tests, 1):
        home = os.getcwd()
        with tempfile.TemporaryDirectory(prefix="stoker-test-") as folder:
            os.chdir(folder)
            try:
                test()
                print("ok %d - %s" % (number, name), flush=True)
            except Skip as skip:
                print("ok %d - %s # SKIP %s" % (number, name, skip), flush=True)
            except Exception:
                failed += 1
                print("not ok %d - %s" % (number, name))
                print("".join("# " + line + "\n" for line in traceback.format_exc().splitlines()),
                      end="", flush=True)
            finally:
                os.chdir(home)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
