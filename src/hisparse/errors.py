"""The exception types of the library, by whose fault it was.

A caller catches `HiSparseError` to catch everything that the library raises on purpose. The command line turns
`InputError` and `BackendError` into one line and exit code 2; the others are faults and keep their traceback.
"""


class HiSparseError(Exception):
    """Root of every exception that the library raises on purpose."""


class InputError(HiSparseError, ValueError):
    """What the caller passed is wrong. The message says what was wrong and what would be right."""


class CapacityError(InputError):
    """What was asked for can never fit. The message gives the size that would."""


class LayoutError(InputError):
    """A cache tensor's layout cannot be certified. The message says what was found and what would be right."""


class BackendError(HiSparseError, RuntimeError):
    """The machine lacks something: a driver, a compiler, pinned memory. The message names the fix."""


class RankError(BackendError):
    """A process that computes a part of the model ended or hangs. The message names it and has its last words."""


class ProtocolError(HiSparseError, RuntimeError):
    """A message between scheduler and worker was unknown, repeated or out of order. The message names its id."""


class InvariantError(HiSparseError, RuntimeError):
    """The library contradicted itself. The message names the ids and the states."""
