# Sourced by ./kvk and ./test: make and refresh the virtual environment of a checkout.
# kvk_venv ROOT EXTRAS   leaves ROOT/.venv ready, installing again only when something changed.

kvk_say() { printf 'kvk: %s\n' "$*" >&2; }

# The newest Python that is new enough, or nothing.
kvk_python() {
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

kvk_venv() {
    root=$1 extras=$2 venv=$1/.venv
    # The place counts too: a checkout that was moved has scripts that point to the old one.
    wanted="$(cksum <"$root/pyproject.toml" | tr ' ' '-') $root"
    stamp=$venv/.kvk-stamp
    have=$(cat "$stamp" 2>/dev/null || true)
    # An environment with the test extra serves without it too.
    if [ -x "$venv/bin/kvk" ]; then
        case $have in
        "$wanted [test]") return 0 ;;
        "$wanted []") [ -n "$extras" ] || return 0 ;;
        esac
    fi
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(kvk_python) || {
            kvk_say "no Python 3.11 or newer found. On Debian: apt-get install python3 python3-venv"
            return 1
        }
        kvk_say "making .venv with $("$python" --version) (first use only)"
        rm -rf "$venv"
        kvk_make_venv "$python" "$venv" || return 1
    fi
    kvk_say "installing kvkernels${extras:+ with the extra $extras} into .venv; this takes a minute"
    # Quiet, but on failure the user sees everything that pip said.
    log=$venv/install.log
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --editable "$root${extras:+[$extras]}" >"$log" 2>&1; then
        cat "$log" >&2
        kvk_say "the installation failed; the lines above say why"
        return 1
    fi
    printf '%s [%s]\n' "$wanted" "$extras" >"$stamp"
}

# Install system packages with apt-get, which only root can and only Debian's family has.
kvk_apt() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    kvk_say "installing $*"
    apt-get install -y -qq "$@" >/dev/null 2>&1 ||
        { apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq "$@" >/dev/null 2>&1; }
}

# Debian splits ensurepip off into python3.x-venv.
kvk_make_venv() {
    if "$1" -c 'import ensurepip' 2>/dev/null && "$1" -m venv "$2"; then
        return 0
    fi
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    rm -rf "$2"
    if kvk_apt "$package"; then
        "$1" -m venv "$2" && return 0
        rm -rf "$2"
    fi
    kvk_say "this Python cannot make virtual environments. Run: apt-get install $package"
    return 1
}

# The names that kvkernels/bench/yardstick.py tries. With the headers of a C library: Debian has
# compilers without them.
kvk_has_compiler() {
    for candidate in "${CC:-}" cc gcc clang; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        printf '#include <stdlib.h>\n' | "$candidate" -E - >/dev/null 2>&1
        return
    done
    return 1
}

# What the tests of GPU code need and Debian has: package, and what shows that it is there.
kvk_gpu_missing() {
    command -v "${CXX:-g++}" >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 || echo g++
    command -v hipcc >/dev/null 2>&1 || echo hipcc
    command -v oclgrind >/dev/null 2>&1 || echo oclgrind
    kvk_has_library libOpenCL.so.1 || echo ocl-icd-libopencl1
    ls "${OCL_ICD_VENDORS:-/etc/OpenCL/vendors}"/*.icd >/dev/null 2>&1 || echo pocl-opencl-icd
}

kvk_has_library() {
    "${LDCONFIG:-/sbin/ldconfig}" -p 2>/dev/null | grep -q "$1"
}

# A C++ compiler for the emulator, hiprtc, an OpenCL device on the CPU. Without them their tests are
# skipped, which fails in CI.
kvk_gpu_tools() {
    missing=$(kvk_gpu_missing | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    # shellcheck disable=SC2086
    kvk_apt --no-install-recommends $missing || true
    missing=$(kvk_gpu_missing | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    kvk_say "missing, so tests of GPU code are skipped. On Debian and Ubuntu run:" \
        "apt-get install --no-install-recommends ${missing% }"
    return 1
}

# A C compiler for the tests that compile. Without one they are skipped, which fails in CI.
kvk_compiler() {
    kvk_has_compiler && return 0
    kvk_apt gcc libc6-dev || true
    kvk_has_compiler && return 0
    kvk_say "no C compiler that works: tests that compile are skipped. On Debian and Ubuntu run:" \
        "apt-get install gcc libc6-dev"
    return 1
}
