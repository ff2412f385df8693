#!/usr/bin/env bash
# Fetch the command-line agents of examples/agents/command_line.py from npm, each in the version that was tested.
#
#   scripts/fetch_command_line_agents.sh [FOLDER]       default: mtrl/command_line_agents in the user's cache folder
#
# They take 700 MB and 20 seconds. The example looks in the default folder, or in the one that MTRL_COMMAND_LINE_AGENTS
# names.
set -euo pipefail

folder=${1:-${MTRL_COMMAND_LINE_AGENTS:-${XDG_CACHE_HOME:-$HOME/.cache}/mtrl/command_line_agents}}
packages="@anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 @qwen-code/qwen-code@0.15.10"

command -v npm >/dev/null || {
    echo "npm is not installed; on Debian and Ubuntu: apt-get install npm" >&2
    exit 1
}
if [ "$(cat "$folder/installed" 2>/dev/null)" != "$packages" ]; then
    mkdir -p "$folder"
    # shellcheck disable=SC2086
    npm install --silent --no-audit --no-fund --no-save --prefix "$folder" $packages >/dev/null
    node "$folder/node_modules/@anthropic-ai/claude-code/install.cjs"  # npm does not run scripts of packages any more
    echo "$packages" >"$folder/installed"
fi
echo "command-line agents are in $folder"
