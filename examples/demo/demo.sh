#!/usr/bin/env bash
# The demo, end to end: a real language model trained on real text with most of its state on disk,
# killed, resumed, and exported as a Hugging Face folder.  `./dev demo` builds and then calls
#
#   demo.sh PATH-OF-STOKER OUTPUT-FOLDER
#
# Needs what setup.sh fetches (called here).  Every number below can be set in the environment.
# DEMO_ONLY=plan makes the model and random tokens, shows what would be where (step 3) and ends:
# nothing is fetched.  tests/python/test_demo_plan.py holds the cap below to account with it.
# Fails (exit code 1) when the killed and resumed run does not end with the same bits as the
# uninterrupted one, when the model has not learned enough, or when transformers disagrees.
set -euo pipefail

[ $# -eq 2 ] || { echo "usage: demo.sh PATH-OF-STOKER OUTPUT-FOLDER" >&2; exit 2; }

steps=${DEMO_STEPS:-120}                       # optimizer steps of each of the two runs
device_memory=${DEMO_DEVICE_MEMORY:-40MiB}     # the parameters alone are 41.4 MiB
micro_batch=${DEMO_MICRO_BATCH:-1}             # sequences per pass; 8 make a step
lr=${DEMO_LR:-1.5e-3}
margin=${DEMO_MARGIN:-0.8}                     # nats that the model must be below the unigram bar
more=${DEMO_TRAIN_OPTIONS:-}                   # further options for `stoker train`
logits_options=${DEMO_LOGITS_OPTIONS:-}        # and for the `stoker eval` that is compared
only=${DEMO_ONLY:-}                            # plan: stop after step 3
checkpoint_every=$((steps / 4))
kill_at=$((steps / 2 + steps / 20 + 1))        # a little after the second checkpoint

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
stoker=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
out=$2
child=
command=()

fail() { printf '\nDEMO FAILED: %s\n' "$*" >&2; exit 1; }
section() { printf '\n== %s  (%ds)\n' "$*" "$SECONDS"; }
say() { printf '   %s\n' "$@"; }
shown() { printf '   $ %s\n' "$*"; "$@"; }
stop_child() { if [ -n "$child" ]; then kill -KILL "$child" 2> /dev/null || true; fi; }
trap stop_child EXIT

# First or last step in a log of JSON lines; 0 when there is none yet.
log_step() {
    local found
    found=$({ grep -oE '"step": *[0-9]+' "$2" 2> /dev/null || true; } | "$1" -n 1)
    echo "${found##*[: ]}" | grep -E '^[0-9]+$' || echo 0
}

# Sets `command`: the training run NAME.  Both runs differ only in output, store and log.
training() {
    local name=$1
    shift
    command=("$stoker" train --model "$out/model" --data "$out/train.safetensors"
        --out "$out/$name" --steps "$steps" --seq 128 --batch 8 --micro-batch "$micro_batch"
        --lr "$lr" --schedule cosine --warmup 10 --weight-decay 0.01 --beta2 0.99 --clip 1.0
        --seed 0 --eval-data "$out/heldout.safetensors" --eval-every "$((steps / 2))"
        --device host:discrete --device-memory "$device_memory" --nvme "$out/nvme-$name"
        --params nvme --optimizer-state nvme
        --checkpoint-every "$checkpoint_every" --keep-checkpoints 2)
    # shellcheck disable=SC2206  # $more is a list of options
    command+=($more "$@")
    mkdir -p "$out/nvme-$name"
}

prepare_folder() {
    if [ -e "$out" ] && [ ! -e "$out/.stoker-demo" ] && [ -n "$(ls -A "$out")" ]; then
        fail "'$out' is not empty and not from an earlier demo; name another folder"
    fi
    [ -x "$stoker" ] || fail "'$stoker' is not a program; build it first"
    mkdir -p "$out"
    out=$(cd "$out" && pwd)
    touch "$out/.stoker-demo"
    # What was fetched stays; everything that the demo makes is made again.
    find "$out" -mindepth 1 -maxdepth 1 ! -name fetched ! -name .stoker-demo -exec rm -rf {} +
}

make_data() {
    section "1. Text, tokenizer, token files"
    say "The King James Bible (public domain) from the Debian package bible-kjv-text; each chapter" \
        "is a document.  A byte-level tokenizer of 1,024 entries is trained on it, and 1.5 % of" \
        "the text, whole chapters, is held out."
    "$here/setup.sh" "$out/fetched" || fail "setup.sh failed, see above"
    if [ -d "$out/fetched/venv" ]; then PATH=$out/fetched/venv/bin:$PATH; fi
    shown python3 "$here/text.py" --data "$out/fetched/bible.data" --out "$out/text.jsonl"
    shown "$stoker" prepare "$out/text.jsonl" \
        --train-tokenizer 1024 --out-tokenizer "$out/tokenizer" --out "$out/train.safetensors" \
        --holdout 0.015 --holdout-out "$out/heldout.safetensors"
    head -n 1 "$out/text.jsonl" > "$out/sample.jsonl"
    shown "$stoker" prepare "$out/sample.jsonl" --tokenizer "$out/tokenizer" \
        --out "$out/sample.safetensors"
    unigram=$(python3 "$here/unigram.py" "$out/train.safetensors" "$out/heldout.safetensors")
    say "A model that knows only how frequent each token is has this cross-entropy on the" \
        "held-out text, the bar to clear by $margin nat:" "$unigram"
}

# Stands in for make_data where only sizes matter: the tokens are of the model's vocabulary, no text.
make_tokens() {
    section "1. Random tokens"
    python3 - "$here/config.json" "$out/train.safetensors" "$out/heldout.safetensors" <<'PYTHON'
import json, random, struct, sys
with open(sys.argv[1]) as f:
    below = json.load(f)["vocab_size"]
numbers = random.Random(0)
for path, n in zip(sys.argv[2:], (131072, 2048)):
    data = struct.pack("<%dH" % n, *[numbers.randrange(below) for _ in range(n)])
    header = json.dumps({"input_ids": {"dtype": "U16", "shape": [n],
                                       "data_offsets": [0, len(data)]}}).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + data)
PYTHON
}

make_model() {
    section "2. A Llama of 22 million parameters, random"
    shown "$stoker" init --config "$here/config.json" --seed 0 --out "$out/model"
    if [ -d "$out/tokenizer" ]; then cp "$out/tokenizer"/* "$out/model/"; fi
}

show_plan() {
    section "3. What would be where"
    say "The device is this processor with a pool of memory of its own, used as a GPU's is: capped at" \
        "$device_memory, below the parameters alone. Parameters and optimizer state live in $out/nvme-*" \
        "and are read and written in every step: some 60 GiB in the whole demo."
    training reference --dry-run
    shown "${command[@]}"
}

run_uninterrupted() {
    section "4. Training, uninterrupted: $steps steps of 8 x 128 tokens"
    training reference --log "$out/reference.jsonl"
    shown "${command[@]}"
}

run_killed() {
    local at
    section "5. The same again, killed with SIGKILL after step $kill_at"
    training killed --log "$out/killed.jsonl"
    "${command[@]}" > "$out/killed.out" 2>&1 &
    child=$!
    local told=0
    until at=$(log_step tail "$out/killed.jsonl"); [ "$at" -ge "$kill_at" ]; do
        kill -0 "$child" 2> /dev/null || { cat "$out/killed.out" >&2
            fail "the run ended at step $at, before it could be killed"; }
        if [ "$at" -ge $((told + 20)) ]; then told=$at; say "step $at of $steps"; fi
        sleep 0.1
    done
    find "$out/killed/checkpoints" -mindepth 1 -maxdepth 1 | grep -q . ||
        fail "step $at is done, but there is no checkpoint in $out/killed/checkpoints"
    kill -KILL "$child"
    wait "$child" 2> /dev/null && fail "the killed run ended well"
    child=
    [ ! -e "$out/killed/model.safetensors" ] || fail "the killed run has left a finished model"
    say "killed at step $at; its checkpoints:" "$(cd "$out/killed/checkpoints" && ls -d -- *)"
    section "6. Resumed from its last checkpoint"
    training killed --resume --log "$out/resumed.jsonl"
    shown "${command[@]}"
    at=$(log_step head "$out/resumed.jsonl")
    [ "$at" -gt 1 ] || fail "the resumed run began at step $at: it started over"
    say "the first step after the resume was $at"
}

compare_runs() {
    section "7. Bits"
    cmp "$out/reference/model.safetensors" "$out/killed/model.safetensors" ||
        fail "the resumed run's weights differ from the uninterrupted run's"
    say "The weights of both runs are equal, bit for bit."
}

check_learning() {
    section "8. What it has learned"
    shown "$stoker" eval --model "$out/killed" --data "$out/heldout.safetensors" --seq 128 \
        --json "$out/eval.json"
    python3 - "$unigram" "$out/eval.json" "$margin" <<'PYTHON' || fail "too little was learned"
import json, sys
bar = json.loads(sys.argv[1])["unigram_cross_entropy"]
with open(sys.argv[2]) as f:
    loss = json.load(f)["loss"]
print("   held-out loss %.3f, unigram %.3f: %.3f nat below, %s are asked for"
      % (loss, bar, bar - loss, sys.argv[3]))
sys.exit(0 if bar - loss >= float(sys.argv[3]) else 1)
PYTHON
}

find_peers() {
    local python
    for python in "${STOKER_PEERS_PYTHON:-}" python3; do
        if [ -n "$python" ] && "$python" -c 'import transformers, torch' 2> /dev/null; then
            echo "$python"
            return
        fi
    done
}

check_export() {
    local peers golden=$root/tests/golden/llama_gqa_old
    section "9. The exported folder elsewhere"
    peers=$(find_peers)
    # shellcheck disable=SC2086  # a list of options
    if [ -n "$peers" ]; then
        shown "$stoker" eval --model "$out/killed" --data "$out/sample.safetensors" --seq 128 \
            --logits "$out/logits.safetensors" $logits_options
        shown "$peers" "$root/tests/golden/compare_live.py" export "$out/killed" \
            "$out/sample.safetensors" "$out/logits.safetensors" --seq 128 ||
            fail "transformers gets other logits from the exported folder"
    elif [ -d "$golden" ]; then
        say "transformers is not installed (STOKER_PEERS_PYTHON may name a python3 that has it)," \
            "so the same path is compared with committed logits of transformers, of a small model."
        shown "$stoker" eval --model "$golden" --data "$golden/data.safetensors" --seq 17 \
            --logits "$out/logits.safetensors" $logits_options
        shown python3 "$here/same_logits.py" "$golden/golden.safetensors" \
            "$out/logits.safetensors" || fail "the committed logits are not reproduced"
    else
        say "transformers is not installed and there are no committed logits: nothing compared."
    fi
}

case $only in
"" | plan) ;;
*) echo "demo.sh: DEMO_ONLY=$only: there is only 'plan'" >&2; exit 2 ;;
esac
prepare_folder
if [ "$only" = plan ]; then
    make_tokens
    make_model
    show_plan
    exit 0
fi
make_data
make_model
show_plan
run_uninterrupted
run_killed
compare_runs
check_learning
check_export
section "The demo is done"
say "Model: $out/killed (config.json, model.safetensors, tokenizer)"
if [ -z "$(find_peers)" ]; then
    say "It was not loaded elsewhere: name a python3 that has transformers in STOKER_PEERS_PYTHON for that."
fi
