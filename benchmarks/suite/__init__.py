"""The suite: each module is one question, with its contenders and its limit."""
