"""Install the system packages that only the tests need, where that is allowed: part of `make test`.

Through apt as root or with password-less sudo; else this prints the exact command, and the tests that need a missing
program skip and name it. With CI=true a missing program is an error. Nothing that gets installed is started.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Debian starts a database server when it installs one. The tests start their own, so for the time of the installation
# a policy file (exit status 101: "not allowed") keeps services down.
INSTALL = """
set -e
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\\nexit 101\\n' > $policy
    chmod 755 $policy
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" > /dev/null
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Something the tests run, the Debian package that brings it, and who needs it."""

    name: str
    package: str
    purpose: str
    present: Callable[[], bool]


def has(command: str) -> Callable[[], bool]:
    return lambda: shutil.which(command) is not None


def has_postgres() -> bool:
    return shutil.which("initdb") is not None or any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def has_compose() -> bool:
    return bool(shutil.which("docker-compose")) or succeeds("docker", "compose", "version")


def succeeds(*command: str) -> bool:
    """Whether the command exists and ends with status 0."""
    return bool(shutil.which(command[0])) and subprocess.run(command, capture_output=True, check=False).returncode == 0


PROGRAMS = (
    Program(name="PostgreSQL server", package="postgresql", purpose="the store on PostgreSQL", present=has_postgres),
    Program(name="Node.js", package="nodejs", purpose="OpenAI's Node client", present=has("node")),
    Program(name="npm", package="npm", purpose="OpenAI's Node client", present=has("npm")),
    Program(name="docker-compose", package="docker-compose", purpose="compose.yaml", present=has_compose),
    Program(name="strace", package="strace", purpose="durability (counting fsync calls)", present=has("strace")),
)


def main() -> int:
    missing = [program for program in PROGRAMS if not program.present()]
    if missing and (become_root := root_command()) is not None:
        packages = [program.package for program in missing]
        say(f"installing what only the tests need: {' '.join(packages)}")
        command = [*become_root, "sh", "-c", INSTALL, "install", *packages]
        if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode != 0:
            say("apt could not install them; its own words are above")
        missing = [program for program in PROGRAMS if not program.present()]
    if not missing:
        return 0
    say("not installed, so the tests that need them will be skipped:")
    for program in missing:
        say(f"  {program.name:20} needed for {program.purpose}")
    say(f"to run those too:\n  sudo apt-get install {' '.join(program.package for program in missing)}")
    if os.environ.get("CI") == "true":
        say("error: in CI every test must run")
        return 1
    return 0


def root_command() -> list[str] | None:
    """What to put before a command to run it as root without a question; None where that cannot be, or without apt."""
    if not shutil.which("apt-get"):
        return None
    if os.geteuid() == 0:
        return []
    if (
        shutil.which("sudo")
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    ):
        return ["sudo", "-n"]
    return None


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
