#!/usr/bin/env bash
# mypy --strict over our packages under their imported names: vkbackend.model is the folder model, and so on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tree=build/typecheck/vkbackend
rm -rf build/typecheck && mkdir -p "$tree"
for entry in vkbackend/*; do ln -s "$PWD/$entry" "$tree/$(basename "$entry")"; done
for package in model spec shaders; do ln -s "$PWD/$package" "$tree/$package"; done
.venv/bin/mypy --strict -p vkbackend
