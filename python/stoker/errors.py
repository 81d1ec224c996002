"""The two ways a command of this package fails.

Each carries one sentence: what, where (file, line, option), what was expected, what to do.
Nothing else is caught and reworded: any other exception is a bug and may show its traceback.
"""


class OperatingError(Exception):
    """The request was sound, the data, a file or the machine was not: exit code 1."""

    exit_code = 1


class UsageError(Exception):
    """The command line contradicts itself or names what does not exist: exit code 2."""

    exit_code = 2


def reason(error):
    """The operating system's words for an OSError, without the path (the sentence has it)."""
    return error.strerror or str(error)
