#!/bin/bash
cd /app/reports || exit 1
for file in *.txt; do
	name=${file%.txt}
	mv "$file" "${name#*.}.${name%%.*}.txt"
done
