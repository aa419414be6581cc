#!/usr/bin/env bash
# Makes .venv with everything that demo and tests need. Runs again in no time when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*" >&2; }

# cksum, not sha256sum: POSIX has it, so macOS too.
stamp=.venv/setup.stamp
key=$(cat pyproject.toml setup.py scripts/setup.sh | cksum | tr ' ' -)
shaders_key=$(cat shaders/*.comp shaders/include/*.glsl shaders/*.py vkbackend/ops/*.py \
    vkbackend/device/{copy,kompute_order}.py | cksum | tr ' ' -)

build_shaders() {
    say "compiling shaders (about 710 the first time: a few minutes; later what has changed)"
    .venv/bin/python -m vkbackend.shaders.build
    printf '%s\n' "$key" "$shaders_key" "$PWD" >"$stamp"
}

if [ -f "$stamp" ]; then
    { read -r old_key && read -r old_shaders && read -r old_place; } <"$stamp" || old_key=
    if [ "$old_key" = "$key" ] && [ "$old_place" = "$PWD" ] && .venv/bin/python -c "" 2>/dev/null; then
        if [ "$old_shaders" != "$shaders_key" ]; then build_shaders; fi
        exit 0
    fi
fi

# ---- system packages: a C++ toolchain and headers to build Kompute's Python module, a Vulkan loader and a driver
usable_python() { # 3.10 to 3.12, able to make a venv, with the headers that kp's build needs
    "$1" - 2>/dev/null <<'PY'
import ensurepip, os, sys, sysconfig, venv
headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 12) and os.path.exists(headers)))
PY
}

find_python() {
    local p
    for p in ${PYTHON:-} python3.12 python3.11 python3.10 python3 /usr/bin/python3; do
        if command -v "$p" >/dev/null && usable_python "$p"; then command -v "$p"; return; fi
    done
}

vulkan_driver() { # any installed driver will do
    if [ -n "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ]; then return 0; fi
    local folder
    for folder in /usr/share /usr/local/share /etc "${XDG_DATA_HOME:-$HOME/.local/share}"; do
        if compgen -G "$folder/vulkan/icd.d/*.json" >/dev/null; then return 0; fi
    done
    return 1
}

missing=()
if command -v dpkg-query >/dev/null; then
    installed() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q "ok installed"; }
    for p in g++ cmake make ca-certificates libvulkan1 libvulkan-dev libfmt-dev pybind11-dev; do
        installed "$p" || missing+=("$p")
    done
    vulkan_driver || missing+=(mesa-vulkan-drivers)
    [ -n "$(find_python)" ] || missing+=(python3 python3-venv python3-dev)
    if [ ${#missing[@]} -gt 0 ]; then
        if [ "$(id -u)" != 0 ]; then
            say "these packages are missing: ${missing[*]}"
            say "install them, then run this again: sudo apt-get install ${missing[*]}"
            exit 1
        fi
        missing+=(vulkan-validationlayers) # tests run under it where it is there; nothing else needs it
        say "installing with apt: ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq || say "apt-get update failed, going on with the package lists at hand"
        apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}" >/dev/null
    fi
else
    for tool in c++ cmake; do command -v "$tool" >/dev/null || missing+=("$tool"); done
    [ -n "$(find_python)" ] || missing+=("python 3.10 to 3.12 with venv and headers")
    if [ ${#missing[@]} -gt 0 ]; then
        say "missing: ${missing[*]} (also needed: Vulkan headers and loader, fmt and pybind11 headers, a Vulkan driver)"
        exit 1
    fi
fi

python=$(find_python)
if [ -z "$python" ]; then
    say "no Python 3.10 to 3.12 with venv and headers was found (python3 is $(python3 --version 2>&1 || true))"
    say "install one and name it: PYTHON=/path/to/python3.12 make setup"
    exit 1
fi

# A venv holds its own path and its interpreter's: one that was moved, left half made, or whose Python is gone, is
# made anew. The log marks it as ours.
log=.venv/setup.log
whole_venv() {
    [ "${old_place:-$PWD}" = "$PWD" ] && usable_python .venv/bin/python && .venv/bin/python -m pip --version
}
if [ -d .venv ] && ! whole_venv >/dev/null 2>&1; then
    if [ ! -f "$log" ]; then
        say ".venv is not from this set-up and can not be used (it takes Python 3.10 to 3.12 with headers, and pip)"
        say "move it away, then run this again"
        exit 1
    fi
    say "making .venv anew: it was made in another folder, is incomplete, or its Python is gone"
    rm -rf .venv
fi
if [ ! -d .venv ]; then
    say "making .venv with $("$python" --version)"
    mkdir .venv && : >"$log"
    "$python" -m venv .venv
fi
quietly() { "$@" >>"$log" 2>&1 || { tail -n 40 "$log" >&2; say "failed: $* (all of it: $log)"; exit 1; }; }
pip() { quietly .venv/bin/python -m pip --disable-pip-version-check "$@"; }
say "fetching pip, setuptools and wheel"
pip install --upgrade "pip>=23" "setuptools>=77" wheel

# kp 0.9.0 has no wheels; without these switches its build downloads fmt, pybind11 and the Vulkan headers. The venv
# comes first on the PATH, or CMake may build the module for another Python.
if ! .venv/bin/python -c "import kp" 2>/dev/null; then
    say "building Kompute's Python module (once: one to four minutes)"
    venv=$PWD/.venv
    quietly env VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" \
        KOMPUTE_OPT_INSTALL=OFF KOMPUTE_OPT_USE_BUILT_IN_FMT=OFF KOMPUTE_OPT_USE_BUILT_IN_PYBIND11=OFF \
        KOMPUTE_OPT_USE_BUILT_IN_VULKAN_HEADER=OFF KOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON \
        "$venv/bin/python" -m pip --disable-pip-version-check install --no-cache-dir "kp==0.9.0" "numpy<2"
    .venv/bin/python -c "import kp" || { say "kp was built but can not be imported"; exit 1; }
fi
say "fetching and installing vkbackend's Python packages (once: half a minute and more, as the network is)"
pip install -e ".[kompute,vulkan,test]"
# setuptools finds an editable package with several folders only after the path was searched, and there the clone itself
# is in the way for Python run beside it: a folder vkbackend, taken for a namespace package. A real package on the path
# comes before any namespace; the link lies alone in its folder, so that nothing else can be imported by it.
mkdir -p .venv/import && ln -sfn "$PWD/vkbackend" .venv/import/vkbackend
echo "$PWD/.venv/import" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vkbackend.pth"
build_shaders
say "done"
