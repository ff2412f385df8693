#!/usr/bin/env bash
# Installs bubblewrap, which isolates the commands that models write, where it is missing. Needs root or sudo.
set -euo pipefail
if command -v bwrap > /dev/null; then
	exit 0
fi
as_root=""
if [ "$(id -u)" != 0 ]; then
	as_root=sudo
fi
if command -v apt-get > /dev/null; then
	export DEBIAN_FRONTEND=noninteractive
	# Without the lists first: a fresh machine has none, any other one need not wait for them.
	$as_root apt-get install -y -q bubblewrap || { $as_root apt-get update -q && $as_root apt-get install -y -q bubblewrap; }
elif command -v dnf > /dev/null; then
	$as_root dnf install -y -q bubblewrap
elif command -v apk > /dev/null; then
	$as_root apk add bubblewrap util-linux bash
else
	echo "install the package bubblewrap of your system; the process sandbox does not run without it" >&2
	exit 1
fi
