"""Front door of `make setup`: find a Python that the pinned packages serve, then go on in installation.py.

Written so that an old Python reads it, and prints a sentence instead of a syntax error.
"""

import os
import platform
import shutil
import subprocess
import sys

PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))  # as in requirements/cpu.toml


def main():
    if sys.version_info[:2] not in PYTHONS:
        go_on_with_another_python()
    from installation import main as install

    return install()


def go_on_with_another_python():
    for major, minor in reversed(PYTHONS):
        other = shutil.which(f"python{major}.{minor}")
        if other and subprocess.call([other, "-c", "import ensurepip"], stderr=subprocess.DEVNULL) == 0:
            sys.stderr.write(f"python is {platform.python_version()}; going on with {other}\n")
            os.execv(other, [other, *sys.argv])
    wanted = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    sys.exit(
        f"set-up stopped: this is Python {platform.python_version()}; one of {wanted} is needed.\n"
        "  Debian 12 or newer, Ubuntu 24.04 or newer:  apt install python3 python3-venv\n"
        "  Fedora:  dnf install python3.13\n"
        "  anywhere:  uv python install 3.13, or pyenv install 3.13\n"
        "Then run:  make PYTHON=/path/to/python3 setup"
    )


if __name__ == "__main__":
    sys.exit(main())
