#!/usr/bin/env bash
# Installs bubblewrap, which isolates the commands that models write, where it is missing. Needs root or sudo.
set -euo pipefail
source "$(dirname "$0")/system_package.sh"
if command -v bwrap > /dev/null; then
	exit 0
fi
install_package bubblewrap util-linux bash # the last two are others on Alpine
