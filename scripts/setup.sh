#!/usr/bin/env bash
# Makes .venv with everything that demo and tests need. Runs again in no time when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*" >&2; }

stamp=.venv/setup.stamp
key=$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)
shaders_key=$(cat shaders/*.comp shaders/include/*.glsl vkbackend/ops/*.py | sha256sum | cut -c1-16)

build_shaders() {
    say "compiling shaders"
    .venv/bin/python -m vkbackend.shaders.build
    echo "$key $shaders_key" > "$stamp"
}

if [ -f "$stamp" ]; then
    read -r old_key old_shaders < "$stamp" || true
    if [ "$old_key" = "$key" ] && [ "$old_shaders" = "$shaders_key" ]; then exit 0; fi
    if [ "$old_key" = "$key" ]; then build_shaders; exit 0; fi
fi

# ---- system packages: a C++ toolchain and headers to build Kompute's Python module, a Vulkan loader and a driver
find_python() {
    local p
    for p in python3.12 python3.11 python3.10 python3; do
        if command -v "$p" >/dev/null && "$p" - <<'PY' 2>/dev/null
import sys, os, sysconfig, venv, ensurepip
ok = (3, 10) <= sys.version_info[:2] <= (3, 12) and os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
sys.exit(not ok)
PY
        then command -v "$p"; return; fi
    done
}

vulkan_driver() { [ -n "$(ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json "${VK_DRIVER_FILES:-}" 2>/dev/null)" ]; }

missing=()
if command -v dpkg >/dev/null; then
    have() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q "ok installed"; }
    for p in g++ cmake make ca-certificates libvulkan1 libvulkan-dev libfmt-dev pybind11-dev; do have "$p" || missing+=("$p"); done
    vulkan_driver || missing+=(mesa-vulkan-drivers)
    [ -n "$(find_python)" ] || missing+=(python3 python3-venv python3-dev)
    if [ ${#missing[@]} -gt 0 ]; then
        if [ "$(id -u)" = 0 ]; then
            say "installing with apt: ${missing[*]}"
            export DEBIAN_FRONTEND=noninteractive
            apt-get update -qq
            apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
        else
            say "these packages are missing: ${missing[*]}"
            say "install them with: sudo apt-get install ${missing[*]}"
            exit 1
        fi
    fi
else
    for tool in g++ cmake; do command -v "$tool" >/dev/null || missing+=("$tool"); done
    [ -n "$(find_python)" ] || missing+=("python 3.10 to 3.12 with venv and headers")
    if [ ${#missing[@]} -gt 0 ]; then
        say "missing: ${missing[*]} (also needed: Vulkan headers and loader, fmt and pybind11 headers, a Vulkan driver)"
        exit 1
    fi
fi

python=$(find_python)
if [ -z "$python" ]; then say "no Python 3.10 to 3.12 with venv and headers was found"; exit 1; fi

if [ ! -x .venv/bin/python ]; then
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
log=.venv/setup.log
quietly() { "$@" >>"$log" 2>&1 || { tail -n 40 "$log" >&2; say "failed: $*"; exit 1; }; }
pip() { quietly .venv/bin/python -m pip --disable-pip-version-check "$@"; }
pip install --upgrade "pip>=23" "setuptools>=68" wheel

# kp 0.9.0 has no wheels; without these switches its build downloads fmt, pybind11 and the Vulkan headers. The venv
# comes first on the PATH, or CMake may build the module for another Python.
if ! .venv/bin/python -c "import kp" 2>/dev/null; then
    say "building Kompute's Python module (about a minute)"
    venv=$PWD/.venv
    quietly env VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" \
        KOMPUTE_OPT_INSTALL=OFF KOMPUTE_OPT_USE_BUILT_IN_FMT=OFF KOMPUTE_OPT_USE_BUILT_IN_PYBIND11=OFF \
        KOMPUTE_OPT_USE_BUILT_IN_VULKAN_HEADER=OFF KOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON \
        "$venv/bin/python" -m pip --disable-pip-version-check install --no-cache-dir "kp==0.9.0" "numpy<2"
    .venv/bin/python -c "import kp" || { say "kp was built but can not be imported"; exit 1; }
fi
say "installing vkbackend and its Python packages"
pip install -e ".[kompute,vulkan,test]"
build_shaders
say "done"
