"""Inside a container: run a module until standard input ends, which it does when the job outside dies.

Run as ``python -m kldaudit.runtime.leash MODULE ARGUMENT …``. The job holds the other end of standard input open and
never writes to it. A job that is killed, even with SIGKILL, lets go of it; then the module is killed, and with it the
container.
"""

import os
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run the module; returns its exit code, 128 + n for signal n."""
    child = subprocess.Popen([sys.executable, "-m", *command], stdin=subprocess.DEVNULL)
    threading.Thread(target=_until_let_go, args=(child,), daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


def _until_let_go(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
