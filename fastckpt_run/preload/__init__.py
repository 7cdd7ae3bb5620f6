"""Workers forked from a process that has imported torch already, instead of each importing it anew."""
