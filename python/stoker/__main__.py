"""Entry of `python3 -m stoker COMMAND ...`: finds the command, turns errors into exit codes.

Owns the exit codes (0 done, 1 operating error, 2 bad use) and the form of an error: one line on
standard error that begins with the command's name.  Knows nothing about the commands' options.
"""

import sys

from . import __version__
from .errors import OperatingError, UsageError

USAGE = "usage: stoker prepare TEXT-or-JSONL... [options]; `stoker prepare --help` lists them"


def main(argv):
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv and argv[0] == "--version":
        print("stoker (python) " + __version__)
        return 0
    if not argv or argv[0] != "prepare":
        named = "'%s' is not a command of the Python package" % argv[0] if argv else "no command"
        print("stoker: %s; %s" % (named, USAGE), file=sys.stderr)
        return 2
    from .prepare import run

    try:
        return run(argv[1:])
    except (OperatingError, UsageError) as error:
        print("stoker prepare: %s" % error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stoker prepare: interrupted, nothing was written", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
