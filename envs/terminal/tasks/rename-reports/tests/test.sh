#!/bin/bash
# The rewards are the share of reports with the right name and content, and whether no other file is left.
cd /app/reports || exit 1
right=0
for name in sales.2024-05-01 sales.2024-06-01 returns.2024-05-01; do
	topic=${name%%.*} date=${name#*.}
	if [ "$(cat "$date.$topic.txt")" = "report $topic of $date" ]; then
		right=$((right + 1))
	fi
done
all=0
if [ "$right" = 3 ] && [ "$(ls | wc -l)" = 3 ]; then
	all=1
fi
echo "{\"reward\": $all, \"right_names\": $right}" > /logs/verifier/reward.json
