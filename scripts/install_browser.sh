#!/usr/bin/env bash
# Installs Chromium, with which the tests look at the viewer's page, where there is none. Needs root or sudo.
set -euo pipefail
source "$(dirname "$0")/system_package.sh"
for browser in chromium chromium-browser google-chrome; do
	if command -v "$browser" > /dev/null; then
		exit 0
	fi
done
install_package chromium
