#!/bin/sh
# The same as touch.py, in little, for --no-python.
echo "creating rank.$RANK"
touch "$JOB_FOLDER/rank.$RANK"
