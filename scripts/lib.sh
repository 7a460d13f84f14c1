# Sourced by the other scripts: where the tree is, what is in it, and how to speak.
# shellcheck shell=bash

set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$top"

command -v go >/dev/null || PATH=$PATH:/usr/local/go/bin
# A workspace file somewhere above the tree would change what every module resolves to, and none of the scripts needs a version stamp.
export GOWORK=off GOFLAGS="${GOFLAGS:-} -buildvcs=false"
# A checkout that belongs to another user (a container's mount) is still the tree that was asked about.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'

say() { printf '== %s\n' "$*"; }
die() { printf '%s: %s\n' "${0#"$top"/}" "$*" >&2; exit 1; }

# files [GLOB ...]: the files of the tree, those not committed yet included, those ignored or deleted not.
# Without git (a source archive) it is every file but the caches.
files() {
	if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
		git -c core.quotePath=false ls-files --cached --others --exclude-standard --deduplicate -- "$@" | while IFS= read -r f; do
			if [ -f "$f" ]; then printf '%s\n' "$f"; fi
		done
	else
		local f g
		find . -type f -not -path './.cache/*' -not -path './.git/*' | sed 's|^\./||' | sort | while IFS= read -r f; do
			if [ $# -eq 0 ]; then printf '%s\n' "$f"; continue; fi
			# shellcheck disable=SC2254 # the glob is meant as a glob
			for g in "$@"; do case $f in $g) printf '%s\n' "$f"; break ;; esac; done
		done
	fi
}

# modules: the directory of every Go module of the tree, the root first.
# product_modules: the same without tools/, whose modules pin programs and hold no code.
modules() { files 'go.mod' '*/go.mod' | sed -e 's|/\{0,1\}go\.mod$||' -e 's|^$|.|' | LC_ALL=C sort; }
product_modules() { modules | grep -v '^tools/'; }
