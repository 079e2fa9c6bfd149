#!/usr/bin/env bash
# Builds the library without Python, under sanitizers, and runs its tests or the fuzz target. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="$here/../../build/native"

usage() {
    cat <<TEXT
Usage: sagellm/csrc/check.sh address | thread | turbomind [address|thread] [ARGUMENT ...] | fuzz [SECONDS] |
                            replay FILE ... | all [SECONDS]

  address   the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
  thread    the native tests under ThreadSanitizer
  turbomind the host that plays TurboMind, under the sanitizers of \`address\` or \`thread\`, with its own arguments: long
            runs are --steps 10000, more is told by --help
  fuzz      the fuzz target, under the sanitizers of \`address\`, for SECONDS (60); a failing input is kept
  replay    the fuzz target on given inputs; SAGELLM_FUZZ_TRACE=1 names the calls
  all       address, thread, fuzz

Builds in build/native/ of the checkout. CXX chooses the compiler: g++ 9 or newer; with clang++ the fuzz target has
libFuzzer. Exit codes: 0 fine, 1 a finding or no build, 2 misuse, 77 this machine cannot.
TEXT
}

say() { printf '%s\n' "$*" >&2; }
cannot() { say "error: $*"; exit 77; }

configure_and_build() {
    local kind="$1" sanitize="$2" build="$folder/$1" generator=()
    command -v cmake >/dev/null || cannot "no cmake; apt install cmake ninja-build, or pip install cmake ninja"
    printf 'int main() {}' | "${CXX:-c++}" -fsanitize="$sanitize" -x c++ - -o /dev/null 2>/dev/null ||
        cannot "${CXX:-c++} cannot link -fsanitize=$sanitize; apt install g++"
    command -v ninja >/dev/null && generator=(-G Ninja)
    mkdir -p "$build"
    exec 9>"$build/lock"
    flock 9 # two runs may not build in one folder at once
    cmake -S "$here" -B "$build" ${generator[@]+"${generator[@]}"} --log-level=WARNING \
        -DSAGELLM_PYTHON=OFF -DSAGELLM_CHECKS=ON -DSAGELLM_SANITIZE="$sanitize" \
        -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" >&2 || exit 1
    cmake --build "$build" --parallel "$(nproc)" >&2 || exit 1
    exec 9>&-
}

build_address() {
    configure_and_build address address,undefined
    # A small quarantine and short stacks make the fuzz target twice as fast.
    export ASAN_OPTIONS="quarantine_size_mb=8:malloc_context_size=6:detect_leaks=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
    export UBSAN_OPTIONS="print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
}

native_tests() {
    local build="$folder/$1" name steps=30 names="threads hook_table port_questions port_notices shm_group team decoder"
    [ "$1" = thread ] || steps=100 names="$names functional block_cache policies copy_pieces kv_strides suffix_tree abi" # of one thread
    shift
    for name in $names; do
        "$@" "$build/tests/native_$name" || exit 1
    done
    "$@" "$build/tests/turbomind_test" --steps "$steps" || exit 1
}

address() {
    build_address
    native_tests address env
}

build_thread() {
    configure_and_build thread thread
    # ThreadSanitizer before GCC 14 cannot place its tables where the kernel scatters addresses widely.
    fixed_addresses=(env)
    setarch -R true 2>/dev/null && fixed_addresses=(setarch -R)
    export TSAN_OPTIONS="halt_on_error=1${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
}

thread() {
    build_thread
    native_tests thread "${fixed_addresses[@]}"
}

turbomind() {
    local kind=address fixed_addresses=(env)
    case "${1:-}" in address | thread) kind="$1"; shift ;; esac
    "build_$kind"
    "${fixed_addresses[@]}" "$folder/$kind/tests/turbomind_test" "$@"
}

fuzz() {
    build_address
    mkdir -p "$folder/findings"
    local seed="${SAGELLM_FUZZ_SEED:-$RANDOM}"
    say "fuzzing for ${1:-60} s, seed $seed"
    "$folder/address/fuzz/prefix_index_fuzz" -max_total_time="${1:-60}" -seed="$seed" -max_len=600 \
        -artifact_prefix="$folder/findings/" || exit 1
}

replay() {
    [ $# -gt 0 ] || { usage >&2; exit 2; }
    build_address
    "$folder/address/fuzz/prefix_index_fuzz" "$@" || exit 1
}

case "${1:-}" in
    address | thread) [ $# -eq 1 ] || { usage >&2; exit 2; }; "$1" ;;
    fuzz | replay | turbomind) "$@" ;;
    all) (address); (thread); (fuzz "${2:-60}") ;;
    -h | --help) usage ;;
    *) usage >&2; exit 2 ;;
esac
