"""End as the argument says, with something to see of how Python ends."""

import atexit
import os
import signal
import sys
import threading

how = sys.argv[1]
atexit.register(print, "atexit")


def fail(depth: int = 3) -> None:
    if depth:
        fail(depth - 1)
    raise ValueError("é failed")


def hook(kind: type, value: BaseException, trace: object) -> None:
    print("hook", kind, value, trace.tb_frame.f_code.co_name, trace.tb_lineno, sys.exc_info())


match how:
    case "well":
        print("no newline", end="")
    case "raise":
        fail()
    case "chain":
        try:
            fail()
        except ValueError as error:
            raise KeyError("second") from error
    case "interrupt":
        raise KeyboardInterrupt
    case "sigint":
        os.kill(os.getpid(), signal.SIGINT)
    case "number":
        sys.exit(3)
    case "text":
        sys.exit("text")
    case "hook":
        sys.excepthook = hook
        fail(0)
    case "bad hook":
        sys.excepthook = lambda *_: 1 / 0
        fail(0)
    case "no hook":
        del sys.excepthook
        fail(0)
    case "exiting hook":
        sys.excepthook = lambda *_: sys.exit(9)
        fail(0)
    case "import":
        import none_such_module  # noqa: F401
    case "atexit":
        atexit.register(fail)
    case "thread":
        threading.Thread(target=fail).start()
    case "at once":
        os._exit(7)
    case "closed":
        sys.stdout.close()
    case "fork":
        if os.fork() == 0:
            fail()
        os.wait()
    case "forked":
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        print("both come here")
    case "stopped hook":
        sys.excepthook = None
        fail(0)
