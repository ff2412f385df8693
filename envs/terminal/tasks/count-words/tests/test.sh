#!/bin/bash
# The reward is 1 if words.txt holds the number of words, else 0.
if [ "$(tr -d '[:space:]' < /app/words.txt)" = 30 ]; then
	echo 1 > /logs/verifier/reward.txt
else
	echo 0 > /logs/verifier/reward.txt
fi
