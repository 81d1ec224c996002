#!/usr/bin/env bash
# tests/gpu/accept/test_accept.sh - accept.sh up to its first device check: what is missing is named, and nothing is built.
# TAP. STOKER_SOURCE: the top of the tree.
set -u
accept=$STOKER_SOURCE/tests/gpu/accept.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
n=0 failed=0
result() { n=$((n + 1)); if [ "$1" = 0 ]; then echo "ok $n - $2"; else failed=1; echo "not ok $n - $2"; sed 's/^/# /' "$work/err"; fi; }
# check NAME EXIT WORDS: of the run before, whose exit status is in rc.
check() { [ "$rc" = "$2" ] && grep -q "$3" "$work/err" && [ "$(wc -l < "$work/err")" -le 1 ]; result $? "$1"; }

bash "$accept" --check --nonsense > "$work/text" 2> "$work/err"; rc=$?
check accept_unknown_option 2 "'--nonsense' is no option"
bash "$accept" --out > "$work/text" 2> "$work/err"; rc=$?
check accept_option_without_value 2 "needs a value"
bash "$accept" --help > "$work/text" 2> "$work/err"; rc=$?
[ $rc = 0 ] && grep -q -- '--pack FILE' "$work/text"; result $? accept_help

# A PATH without nvcc: a folder of links to what the script uses.
mkdir "$work/bin"
for tool in bash readlink dirname; do ln -s "$(command -v $tool)" "$work/bin/$tool"; done
if [ -x /usr/local/cuda/bin/nvcc ]; then
    echo "ok $((n = n + 1)) - accept_without_nvcc # SKIP nvcc is where the script looks besides PATH"
else
    PATH=$work/bin "$work/bin/bash" "$accept" --check --out "$work/out" > "$work/text" 2> "$work/err"; rc=$?
    check accept_without_nvcc 2 "no nvcc"
fi

if PATH=$PATH:/usr/local/cuda/bin command -v nvcc > /dev/null; then
    bash "$accept" --check --out "$work/out" > "$work/text" 2> "$work/err"; rc=$?
    if [ $rc = 0 ]; then
        grep -q '^accept: ready: ' "$work/text"; result $? accept_check_with_a_card
    else
        check accept_stops_at_device_check 3 'stopped at the device check: .*: .*'
        # a whole run stops there, too: no build, no table
        bash "$accept" --out "$work/out" > "$work/text" 2> "$work/err"; rc=$?
        check accept_run_stops_at_device_check 3 'stopped at the device check'
        [ -z "$(ls "$work/out")" ]; result $? accept_run_without_card_leaves_nothing
    fi
else
    echo "ok $((n = n + 1)) - accept_stops_at_device_check # SKIP no nvcc"
fi
echo "1..$n"
exit $failed
