#!/bin/sh
# Checks for a clang for the Metal simulator. Installs one through apt if it is missing, or prints how to install it.
set -eu

if [ -n "${METAL_SIM_CLANG:-}" ] && command -v "$METAL_SIM_CLANG" >/dev/null; then
    echo "metal_sim: using $METAL_SIM_CLANG"
    exit 0
fi

for version in 16 17 18 19 20 21 22; do
    if command -v "clang++-$version" >/dev/null; then
        echo "metal_sim: found clang++-$version"
        exit 0
    fi
done

for clang in clang++ /opt/homebrew/opt/llvm/bin/clang++ /usr/local/opt/llvm/bin/clang++; do
    if command -v "$clang" >/dev/null; then
        major=$("$clang" --version | sed -n 's/.*clang version \([0-9]*\).*/\1/p' | head -n 1)
        if [ "${major:-0}" -ge 16 ]; then
            echo "metal_sim: found $clang ($major)"
            exit 0
        fi
    fi
done

if command -v apt-get >/dev/null; then
    sudo=""
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || {
            echo "metal_sim: needs clang 16 or newer; run as root: apt-get install clang-16" >&2
            exit 1
        }
        sudo="sudo"
    fi
    echo "metal_sim: installing clang-16 through apt"
    $sudo apt-get update
    $sudo apt-get install -y --no-install-recommends clang-16 && exit 0
    echo "metal_sim: apt has no clang-16; install clang 16 or newer and set METAL_SIM_CLANG" >&2
    exit 1
fi

echo "metal_sim: needs clang 16 or newer (Mac: brew install llvm), or METAL_SIM_CLANG=/path/to/clang++" >&2
exit 1
