#!/usr/bin/env bash
# Installs Chromium, with which the tests look at the viewer's page, where there is none. Needs root or sudo.
set -euo pipefail
for browser in chromium chromium-browser google-chrome; do
	if command -v "$browser" > /dev/null; then
		exit 0
	fi
done
as_root=""
if [ "$(id -u)" != 0 ]; then
	as_root=sudo
fi
if command -v apt-get > /dev/null; then
	export DEBIAN_FRONTEND=noninteractive
	# Without the lists first: a fresh machine has none, any other one need not wait for them.
	$as_root apt-get install -y -q chromium || { $as_root apt-get update -q && $as_root apt-get install -y -q chromium; }
elif command -v dnf > /dev/null; then
	$as_root dnf install -y -q chromium
elif command -v apk > /dev/null; then
	$as_root apk add chromium
else
	echo "install Chromium; the tests of the viewer's page do not run without it" >&2
	exit 1
fi
