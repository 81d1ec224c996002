#!/usr/bin/env bash
# tests/gpu/accept.sh - settles the CUDA device on a real card, in at most six minutes, the build for that card included.
#
#     tests/gpu/accept.sh [--out DIR] [--limit SECONDS] [--work DIR] [--nvme DIR] [--parts A,B,...]
#     tests/gpu/accept.sh --check          is all here that a run needs? 0: yes; 3: no card; 2: something else is missing
#     tests/gpu/accept.sh --pack FILE      writes a tarball that runs where there is neither network nor meson, ninja,
#                                          pkg-config or any of Debian's libraries: nvcc, a C compiler and CUDA's are enough
#
# Of a tarball:  tar xzf FILE && stoker/tests/gpu/accept.sh --out DIR
#
# DIR (accept-out) has accept.md, one table, accept.json, and logs.tar.gz, all written anew as parts end, so that what ran is
# there whatever ends this. --work (a new folder of TMPDIR, removed at the end) holds a model of 2.2 GB, its exports and 16 GB
# of its state, unless --nvme names a folder on a faster drive for that.
# A part that fails or outlasts its time is a row that says so, and the next one begins. Parts, in this order:
#   card rates build ops small model24 torch fsdp model6 memcheck racecheck nvme24 nvme6
# Figures of speed are medians over steps but the first; peak device memory is by the driver's count: nvidia-smi each 50 ms, or
# cudaMemGetInfo where that is not to be had, less what was taken before. Exit 0: all parts ran and passed; 1: a row says what
# did not.
set -uo pipefail

self=$(readlink -f "${BASH_SOURCE[0]}")
root=$(dirname "$(dirname "$(dirname "$self")")")
here=$root/tests/gpu/accept
out=accept-out work= nvme= limit=360 only= mode=run pack=
failed=0
SECONDS=0

refuse() { printf 'accept: %s\n' "$2" >&2; exit "$1"; }

while [ $# -gt 0 ]; do
    case $1 in
    --check) mode=check; shift ;;
    --pack | --out | --limit | --work | --nvme | --parts)
        [ $# -ge 2 ] || refuse 2 "$1 needs a value"
        case $1 in
        --pack) mode=pack pack=$2 ;;
        --out) out=$2 ;;
        --limit) limit=$2 ;;
        --work) work=$2 ;;
        --nvme) nvme=$2 ;;
        --parts) only=,$2, ;;
        esac
        shift 2 ;;
    -h | --help) sed -n '2,20s/^# \{0,1\}//p' "$self"; exit 0 ;;
    *) refuse 2 "'$1' is no option; --help lists them" ;;
    esac
done

if [ $mode = pack ]; then exec python3 "$here/pack.py" --root "$root" --out "$pack"; fi

# --- what a run needs ---------------------------------------------------------------------------------------------------

nvcc=$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc) || refuse 2 "no nvcc in PATH or /usr/local/cuda/bin: install NVIDIA's CUDA 13 toolkit"
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
cc=${CC:-$(command -v gcc || command -v cc)} || refuse 2 "no C compiler (gcc or cc in PATH)"
cudart=
for file in "$cuda"/lib64/libcudart_static.a "$cuda"/lib/libcudart_static.a "$cuda"/targets/*/lib/libcudart_static.a; do
    [ ! -e "$file" ] || { cudart=$file; break; }
done
[ -n "$cudart" ] || refuse 2 "no libcudart_static.a under $cuda: install the development files of CUDA's runtime"
[ -e "$cuda/include/cuda_runtime_api.h" ] || refuse 2 "no include/cuda_runtime_api.h under $cuda: install the headers of CUDA's runtime"
if [ -e "$root/bundle/compile.txt" ]; then
    how=bundle
elif command -v meson > /dev/null && command -v ninja > /dev/null && command -v pkg-config > /dev/null; then
    how=meson
else
    refuse 2 "this tree has no bundle/ (accept.sh --pack makes a tarball that has) and this machine no meson, ninja and pkg-config"
fi

out=$(mkdir -p "$out" && cd "$out" && pwd) || refuse 2 "$out cannot be made"
if [ -n "$work" ]; then
    work=$(mkdir -p "$work" && cd "$work" && pwd) || refuse 2 "--work cannot be made"
else
    work=$(mktemp -d "${TMPDIR:-/tmp}/stoker-accept.XXXXXX") || refuse 2 "no folder can be made in ${TMPDIR:-/tmp}"
    trap 'rm -rf "$work"' EXIT
fi
logs=$work/logs
rows=$logs/rows.tsv
mkdir -p "$logs"
: > "$rows"

"$cc" -std=c11 -D_GNU_SOURCE -O2 -isystem "$cuda/include" -o "$work/tool" "$here/tool.c" "$cudart" -ldl -lrt -lpthread \
    > "$logs/tool.log" 2>&1 || refuse 2 "$here/tool.c does not compile: $(head -n 1 "$logs/tool.log")"

# The first device check.
if ! "$work/tool" card > "$logs/card.txt" 2> "$logs/card.err"; then
    refuse 3 "stopped at the device check: $(cat "$logs/card.err")"
fi
card_value() { awk -v k="$1" '$1 == k { sub(/^[^ ]* /, ""); print }' "$logs/card.txt"; }
arch=$(card_value capability)
if [ $mode = check ]; then
    printf 'accept: ready: %s, compute capability %s, built by %s\n' "$(card_value name)" "$arch" "$how"
    exit 0
fi

# Libraries that are opened at run time: CUDA's folder first, else those that python's packages brought.
libraries=$cuda/lib64:$root/bundle/lib
for name in libcublasLt.so.13 libcudnn.so.9; do
    [ ! -e "$cuda/lib64/$name" ] || continue
    found=$(python3 - "$name" 2> /dev/null <<'PY'
import glob, os, site, sys
for base in site.getsitepackages() + sys.path:
    for hit in glob.glob(os.path.join(base, "nvidia", "*", "lib", sys.argv[1])):
        print(os.path.dirname(hit)); sys.exit()
PY
    )
    [ -z "$found" ] || libraries=$libraries:$found
done
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# --- rows, the table, limits --------------------------------------------------------------------------------------------

# row PART WHAT VALUE [UNIT] [NOTE]; both files are complete after each.
row() {
    printf '%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "${4:-}" "$(printf '%s' "${5:-}" | tr '\t\n' '  ')" >> "$rows"
    { printf '| part | what | value | unit | note |\n|---|---|---|---|---|\n'
      awk -F '\t' '{ gsub(/\|/, "/"); printf "| %s | %s | %s | %s | %s |\n", $1, $2, $3, $4, $5 }' "$rows"; } > "$out/accept.md.new"
    awk -F '\t' 'function q(s) { gsub(/\\/, "\\\\", s); gsub(/"/, "\\\"", s); gsub(/[[:cntrl:]]/, " ", s); return "\"" s "\"" }
        function v(s) { return s ~ /^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$/ ? s : q(s) }
        BEGIN { printf "{\"format\": 1, \"rows\": [" }
        { printf "%s\n {\"part\": %s, \"what\": %s, \"value\": %s, \"unit\": %s, \"note\": %s}", (NR > 1 ? "," : ""), q($1), q($2), v($3), q($4), q($5) }
        END { printf "\n]}\n" }' "$rows" > "$out/accept.json.new"
    mv "$out/accept.md.new" "$out/accept.md"
    mv "$out/accept.json.new" "$out/accept.json"
}
bad() { failed=1; row "$@"; }

keep_logs() { tar czf "$out/logs.tar.gz.new" -C "$work" logs && mv "$out/logs.tar.gz.new" "$out/logs.tar.gz"; }

# part NAME SECONDS: begins a part; false: there is no time for it, or it was not asked for.
part_end=0
part() {
    [ -z "$only" ] || [[ $only = *,$1,* ]] || return 1
    local left=$((limit - SECONDS))
    if [ "$left" -lt 5 ]; then
        bad "$1" "not run" "" "" "the $limit s are over"
        return 1
    fi
    keep_logs
    part_end=$((SECONDS + ($2 < left ? $2 : left)))
    printf '== %s (%d s)\n' "$1" "$SECONDS"
}
# Runs a command inside the time of its part; 124: it was stopped.
lim() {
    local left=$((part_end - SECONDS))
    [ "$left" -gt 0 ] || return 124
    timeout -k 3 "$left" "$@"
}
why() { if [ "$1" = 124 ] || [ "$1" = 137 ]; then echo "its time was over"; else echo "exit $1: $(tail -n 1 "$2" | cut -c1-300)"; fi; }
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f", b - a }'; }

gib() { awk '{ printf "%.2f", $1 / 2^30 }'; }
per() { awk -v r="$1" -v d="$2" 'BEGIN { printf "%.1f", r / d }'; }

# number KEY FILE: of JSON lines, a number a line.
number() { grep -o "\"$1\":[^,}]*" "$2" | sed 's/^[^:]*: *//'; }
median() { sort -g | awk '{ x[NR] = $1 } END { if (NR) printf "%.6g", NR % 2 ? x[(NR + 1) / 2] : (x[NR / 2] + x[NR / 2 + 1]) / 2 }'; }
mean() { awk '{ s += $1; n++ } END { if (n) printf "%.4g", s / n }'; }

# --- models and runs ----------------------------------------------------------------------------------------------------

stoker=$root/build-accept/stoker
small=$here/small.json
large=$here/llama-1.1b.json
config() { grep -o "\"$1\": *[0-9]*" "$2" | grep -o '[0-9]*$'; }

# FLOPs of a token in forward and backward: 6 for each element of a matrix (the head's, not the embedding's), and causal
# attention: 6 x layers x hidden x sequence.
token_flops() {
    awk -v l="$(config num_hidden_layers "$1")" -v h="$(config hidden_size "$1")" -v i="$(config intermediate_size "$1")" \
        -v a="$(config num_attention_heads "$1")" -v k="$(config num_key_value_heads "$1")" -v v="$(config vocab_size "$1")" -v s="$2" \
        'BEGIN { printf "%.6g", 6 * (l * (2 * h * h + 2 * h * h * k / a + 3 * h * i) + v * h) + 6 * l * h * s }'
}

# watched FILE COMMAND...: runs it; FILE gets the most memory that was taken on the card meanwhile. nvidia-smi takes none itself,
# `tool watch` a context.
smi=
[ "$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2> /dev/null | grep -c '^[0-9]')" != 1 ] || smi=1
watched() {
    local file=$1 rc pid
    shift
    : > "$file"
    rm -f "$work/watch.in"
    mkfifo "$work/watch.in"
    if [ -n "$smi" ]; then nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 50 < /dev/null > "$file" 2>&1 &
    else "$work/tool" watch < "$work/watch.in" > "$file" 2>&1 & fi
    pid=$!
    exec 7<> "$work/watch.in"
    for _ in $(seq 100); do [ ! -s "$file" ] || break; sleep 0.1; done
    lim "$@" 7>&-
    rc=$?
    if [ -n "$smi" ]; then
        kill "$pid"
        wait "$pid" 2> /dev/null
        awk 'NR == 1 { first = $1 } $1 > most { most = $1 } END { printf "most_bytes %.0f\n", (most - first) * 2^20 }' "$file" > "$file.most"
        mv "$file.most" "$file"
    else
        echo >&7
        wait "$pid"
    fi
    exec 7>&-
    return $rc
}
peak_of() { awk '$1 == "most_bytes" { printf "%.3f", $2 / 2^30 }' "$1"; }

# train NAME MODEL DATA OPTIONS...: into $logs/NAME.jsonl and .log; its export is in $work/NAME.
train() {
    local name=$1 model=$2 data=$3
    shift 3
    rm -rf "${work:?}/$name" "$logs/$name.jsonl"
    watched "$logs/$name.watch" "$stoker" train --model "$model" --data "$data" --out "$work/$name" --log "$logs/$name.jsonl" \
        --progress none --predict off --lr 1e-4 "$@" > "$logs/$name.log" 2>&1
}

# Rows of a run of the large model.
speed_rows() {
    local name=$1 log=$logs/$1.jsonl rate steps share
    [ -s "$log" ] || return
    steps=$(wc -l < "$log")
    tail -n +2 "$log" > "$work/steady.jsonl"
    [ -s "$work/steady.jsonl" ] || cp "$log" "$work/steady.jsonl"
    rate=$(number tokens_per_s "$work/steady.jsonl" | median)
    share=$(awk -v r="$rate" -v f="$(token_flops "$large" 2048)" -v p="${matrix_rate:-0}" 'BEGIN { if (p > 0) printf "%.3f", r * f / p }')
    row "$name" "speed" "$rate" "tokens/s" "$steps steps, the median of those after the first"
    row "$name" "step" "$(number step_s "$work/steady.jsonl" | median)" "s"
    row "$name" "share of the card's matrix rate" "$share" "" "$(token_flops "$large" 2048) FLOPs a token"
    for cause in nvme copy update gather other; do
        row "$name" "exposed: $cause" "$(number "$cause" "$work/steady.jsonl" | mean)" "s" "mean of a step"
    done
    row "$name" "compute" "$(number compute_s "$work/steady.jsonl" | mean)" "s" "$(grep '^busiest' "$logs/$name.log" | tr -s ' ' | cut -c1-200)"
    row "$name" "peak on the card" "$(peak_of "$logs/$name.watch")" "GiB" "by the driver's count"
    row "$name" "peak of the process" "$(number peak_rss_bytes "$log" | tail -n 1 | awk '{ printf "%.2f", $1 / 2^30 }')" "GiB" "host memory"
}

# A cap in GiB as the option's value: what is free where the card has less.
cap_text() { card_value free_bytes | awk -v c="$1" '{ m = int($1 / 2^20) - 64; if (m < c * 1024) printf "%dMiB", m; else printf "%dGiB", c }'; }

# large_part NAME SECONDS CAP OPTIONS...
large_part() {
    local name=$1 cap=$3 rc
    part "$name" "$2" || return
    shift 3
    [ -e "$work/large/config.json" ] || { bad "$name" "not run" "" "" "the model was not made"; return; }
    train "$name" "$work/large" "$work/large.bin" --device cuda --device-memory "$(cap_text "$cap")" --seq 2048 --batch 8 "$@"
    rc=$?
    speed_rows "$name"
    peak=$(peak_of "$logs/$name.watch")
    if [ -n "$peak" ] && awk -v p="$peak" -v c="$cap" 'BEGIN { exit !(p > c) }'; then bad "$name" "cap" "exceeded" "" "$peak GiB of $cap"; fi
    [ $rc = 0 ] || bad "$name" "run" "failed" "" "$(why $rc "$logs/$name.log")"
    rm -rf "${work:?}/$name"
}

# --- parts --------------------------------------------------------------------------------------------------------------

build_by_meson() {
    [ -e "$root/build-accept/build.ninja" ] ||
        lim meson setup "$root/build-accept" "$root" -Dbuildtype=debugoptimized -Dcuda=enabled -Dgpu_archs="$arch" || return
    lim ninja -C "$root/build-accept" stoker tests/gpu/accept/gpu_card_ops || return
    ! ninja -C "$root/build-accept" -t targets all | grep -q '^tests/gpu/accept/gpu_card_device_ops:' ||
        lim ninja -C "$root/build-accept" tests/gpu/accept/gpu_card_device_ops
}

if part card 10; then
    row card "card" "$(card_value name)"
    row card "compute capability" "$arch"
    row card "memory" "$(card_value total_bytes | gib)" "GiB" "$(card_value free_bytes | gib) free"
    row card "CUDA" "$(card_value runtime)" "" "driver for $(card_value driver), $("$nvcc" --version | grep -o 'V[0-9][0-9.]*')"
    processor=$(grep -m 1 'model name' /proc/cpuinfo | sed 's/.*: //')
    row card "host" "$(nproc)" "cores" "$processor, $(awk '/MemTotal/ { printf "%.0f GiB", $2 / 2^20 }' /proc/meminfo), Linux $(uname -r)"
fi

if part rates 20; then
    if lim "$work/tool" copies > "$logs/copies.txt" 2>&1; then
        while read -r way rate; do
            row rates "copies, $way" "$(per "$rate" 1e9)" "GB/s" "pinned memory, 256 MiB at a time"
        done < "$logs/copies.txt"
    else
        bad rates "copies" "failed" "" "$(why $? "$logs/copies.txt")"
    fi
fi

built=0
if part build 150; then
    begin=$(now)
    if [ $how = bundle ]; then
        lim bash "$here/build.sh" "$root" "$cuda" "$cudart" "$arch" "$cc" > "$logs/build.log" 2>&1
    else
        build_by_meson > "$logs/build.log" 2>&1
    fi
    rc=$?
    if [ $rc = 0 ]; then
        built=1
        row build "time" "$(since "$begin")" "s" "for sm_$arch alone, by $how, $(nproc) at a time"
    else
        bad build "build" "failed" "" "$(why $rc "$logs/build.log")"
    fi
elif [ -x "$stoker" ]; then
    built=1
fi
[ $built = 1 ] || { keep_logs; printf 'accept: without a build nothing more can run; %s has what there is\n' "$out/accept.md" >&2; exit 1; }

matrix_rate=
if part ops 45; then
    lim "$root/build-accept/tests/gpu/accept/gpu_card_ops" > "$logs/ops.txt" 2>&1
    rc=$?
    matrix_rate=$(awk '$2 == "matrix_rate" { print $3 }' "$logs/ops.txt")
    numerics=$(grep '^# numerics' "$logs/ops.txt" | cut -c12-)
    worst=$(grep -o '[0-9.]* of the bound' "$logs/ops.txt" | sort -g | tail -n 1)
    [ -z "$matrix_rate" ] || row rates "matrix products" "$(per "$matrix_rate" 1e12)" "TFLOP/s" "bf16 where the card has it; $numerics"
    row ops "operations beside the host's" "$(grep -c '^# operation ' "$logs/ops.txt")" "" "worst: $worst"
    [ $rc = 0 ] || bad ops "operations" "failed" "" "$(why $rc "$logs/ops.txt"); $(grep '^not ok' "$logs/ops.txt" | tr '\n' ' ')"
    if [ -x "$root/build-accept/tests/gpu/accept/gpu_card_device_ops" ]; then
        if lim "$root/build-accept/tests/gpu/accept/gpu_card_device_ops" > "$logs/device_ops.txt" 2>&1; then
            row ops "the stand-in's list of operations, on the card" "passed"
        else
            bad ops "the stand-in's list of operations, on the card" "failed" "" "$(grep '^#' "$logs/device_ops.txt" | head -n 1)"
        fi
    fi
fi

# The large model is made while the small one is compared: nothing is timed meanwhile.
maker=
if [ ! -e "$work/large/config.json" ] && { [ -z "$only" ] || [[ $only =~ model|nvme|torch|fsdp ]]; }; then
    "$work/tool" tokens "$work/large.bin" $((2048 * 8 * 8 + 1)) "$(config vocab_size "$large")"
    { timeout $((limit - SECONDS > 120 ? 120 : limit - SECONDS + 1)) "$stoker" init --config "$large" --out "$work/large.part" > "$logs/init.log" 2>&1 &&
        mv "$work/large.part" "$work/large"; } &
    maker=$!
fi

# losses CUDA HOST TYPE MOST: the row of the largest relative difference between two runs, over all steps.
losses() {
    local worst n
    read -r worst n < <(paste <(number loss "$logs/$1.jsonl") <(number loss "$logs/$2.jsonl") |
        awk '{ d = ($1 - $2) / $2; if (d < 0) d = -d; if (!(d <= m)) m = d; n++ } END { printf "%.3g %d\n", m, n }')
    if awk -v w="$worst" -v n="$n" -v m="$4" 'BEGIN { exit !(n == 20 && w <= m) }'; then
        row small "losses of 20 steps, $3: largest relative difference" "$worst" "" "cuda beside host; at most $4"
    else
        bad small "losses of 20 steps, $3" "differ" "" "by $worst over $n steps; at most $4"
    fi
}
small_train() {
    local name=$1
    shift
    train "$name" "$work/small" "$work/small.bin" --seq 128 --batch 8 --micro-batch 2 --steps 20 "$@"
    local rc=$?
    [ $rc = 0 ] || bad small "$name" "failed" "" "$(why $rc "$logs/$name.log")"
    return $rc
}
# same_bits NAME HOW OPTIONS...: another run on the card ends with the weights whose sum is in a.
same_bits() {
    local name=$1 how_placed=$2
    shift 2
    small_train "$name" --device cuda "$@" || return
    if [ "$a" = "$(sha256sum < "$work/$name/model.safetensors")" ]; then
        row small "weights after 20 steps, $how_placed" "equal bits" "" "to those of states in memory"
    else
        bad small "weights after 20 steps, $how_placed" "other bits" "" "than those of states in memory"
    fi
}
if part small 60; then
    rm -rf "$work/small"
    "$work/tool" tokens "$work/small.bin" $((128 * 8 * 20 + 1)) "$(config vocab_size "$small")"
    "$stoker" init --config "$small" --out "$work/small" > "$logs/small_init.log" 2>&1
    f32=(--matmul f32 --activation-dtype f32)
    if small_train small_host_f32 --device host "${f32[@]}" && small_train small_cuda_f32 --device cuda "${f32[@]}"; then
        losses small_cuda_f32 small_host_f32 f32 0.001
    fi
    if small_train small_host --device host && small_train small_cuda --device cuda; then losses small_cuda small_host bf16 0.02; fi
    mkdir -p "${nvme:=$work/nvme}"
    a=$(sha256sum 2> /dev/null < "$work/small_cuda/model.safetensors")
    same_bits small_nvme "on NVMe with recomputation and serial update" --nvme "$nvme" --params nvme --optimizer-state nvme --grads nvme \
        --activations recompute --update serial
    same_bits small_again "in memory, again"
fi
[ -z "$maker" ] || wait "$maker" || bad model24 "the model" "was not made" "" "$(tail -n 1 "$logs/init.log")"

# Both caps with all state in host memory: as if the card held nothing between steps.
in_memory=(--params host --optimizer-state host --grads host)
large_part model24 50 24 --micro-batch 2 --steps 6 "${in_memory[@]}"

# peer NAME SECONDS MODE CAP
peer() {
    part "$1" "$2" || return
    local rc rate ours
    watched "$logs/$1.watch" python3 "$here/peer.py" --mode "$3" --config "$large" --seq 2048 --batch 8 --micro-batch 2 --steps 5 \
        --cap-gib "$(awk -v c="$4" -v f="$(card_value free_bytes)" 'BEGIN { f = f / 2^30 - 0.1; printf "%.2f", c && f < c ? f : c }')" > "$logs/$1.log" 2>&1
    rc=$?
    case $rc in
    0) ;;
    4 | 127) row "$1" "not run" "" "" "python3 has no torch that sees the card"; return ;;
    *) bad "$1" "run" "failed" "" "$(why $rc "$logs/$1.log")" ;;
    esac
    rate=$(number tokens_per_s "$logs/$1.log" | tail -n +2 | median)
    [ -n "$rate" ] || return
    row "$1" "speed" "$rate" "tokens/s" "$(grep -m 1 '^torch ' "$logs/$1.log"), $(grep -c tokens_per_s "$logs/$1.log") steps, the median of those after the first"
    row "$1" "peak on the card" "$(peak_of "$logs/$1.watch")" "GiB" "by the driver's count"
    [ -s "$logs/model24.jsonl" ] || return
    ours=$(number tokens_per_s <(tail -n +2 "$logs/model24.jsonl") | median)
    [ -z "$ours" ] || row "$1" "stoker under 24 GiB beside it" "$(awk -v a="$ours" -v b="$rate" 'BEGIN { printf "%.3f", a / b }')" "x"
}
peer torch 50 plain 0
peer fsdp 60 fsdp 24

large_part model6 45 6 --micro-batch 1 --steps 4 "${in_memory[@]}"

# sanitizer TOOL
sanitizer() {
    part "$1" 45 || return
    local found
    found=$(PATH=$PATH:$cuda/bin:$cuda/compute-sanitizer command -v compute-sanitizer) || { row "$1" "not run" "" "" "no compute-sanitizer"; return; }
    [ -e "$work/small/config.json" ] || { bad "$1" "not run" "" "" "the small model was not made"; return; }
    rm -rf "${work:?}/$1"
    lim "$found" --tool "$1" --error-exitcode 9 "$stoker" train --model "$work/small" --data "$work/small.bin" --out "$work/$1" \
        --device cuda --seq 64 --batch 2 --micro-batch 1 --steps 2 --progress none --predict off > "$logs/$1.log" 2>&1
    local rc=$? summary
    summary=$(grep 'SUMMARY' "$logs/$1.log" | sed 's/^=* *//' | tr '\n' ' ')
    if [ $rc = 0 ]; then
        row "$1" "two steps of the small model" "clean" "" "$summary"
    else
        bad "$1" "two steps of the small model" "failed" "" "$(why $rc "$logs/$1.log") $summary"
    fi
}
sanitizer memcheck
sanitizer racecheck

on_nvme=(--nvme "${nvme:=$work/nvme}" --params nvme --optimizer-state nvme)
mkdir -p "$nvme"
large_part nvme24 60 24 --micro-batch 2 --steps 3 "${on_nvme[@]}"
large_part nvme6 60 6 --micro-batch 1 --steps 3 "${on_nvme[@]}"

keep_logs
row all "time" "$SECONDS" "s" "$([ $failed = 0 ] && echo 'all parts ran and passed' || echo 'see the rows that say what did not')"
cat "$out/accept.md"
exit $failed
