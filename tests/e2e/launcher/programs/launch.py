"""Run code in a folder, as ``python -c`` does: launch.py FOLDER ERRORS PYTHONPATH CODE ARGUMENTS."""

import os
import sys

if __name__ == "__main__":
    folder, errors, path, code = sys.argv[1:5]
    os.chdir(folder)
    with open(errors, "ab") as file:
        os.dup2(file.fileno(), 2)
    os.environ["PYTHONPATH"] = path
    sys.argv[1:] = sys.argv[5:]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
