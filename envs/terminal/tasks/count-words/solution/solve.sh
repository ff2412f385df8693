#!/bin/bash
wc -w < /app/poem.txt > /app/words.txt
