"""Every error that the user can act on: one line that says what was expected, what was found and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches
from os.path import commonprefix
from pathlib import Path


def install(*extras: str) -> str:
    """The end of a message about a package that is missing and belongs to one of these extras: what to do."""
    commands = [f"`pip install -e '.[{extra}]'`" for extra in extras]
    return f"{' or '.join(commands)} in a checkout installs what is needed"


def close_to(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one is most likely a misspelling of; what all of them begin with does not count."""
    known = list(known)
    stem = len(commonprefix([name, *known]))
    found = get_close_matches(name[stem:], [other[stem:] for other in known], 1, 0.7)
    return name[:stem] + found[0] if found else None


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the one that was meant, or all there are."""
    known = list(known)
    close = close_to(name, known)
    return f"did you mean {close}?" if close else f"expected one of {', '.join(known)}"


class Dsv4Error(Exception):
    """Base class. The command line prints it as one line and exits with status 2."""


class ConfigError(Dsv4Error):
    """config.json, a setting or an environment variable is missing, unknown or contradicts another."""

    @classmethod
    def no_checkpoint(cls, directory: Path) -> "ConfigError":
        """What is wrong with a model's directory in which no config.json could be found."""
        if directory.is_dir():
            return cls(f"{directory}: holds no config.json; expected a checkpoint directory")
        if directory.exists():
            return cls(f"{directory}: is a file; expected a checkpoint directory")
        return cls(f"{directory}: not found; expected a checkpoint directory, or nano, the embedded model")


class CheckpointError(Dsv4Error):
    """A shard, an index or a tensor is missing, truncated, misshapen or holds what it must not."""


class InputError(Dsv4Error):
    """A request that cannot be served: token ids, prompt length, sampling parameters."""


class StateError(Dsv4Error):
    """A rewind, restore or fork that the state cannot honour, or a snapshot that is not ours."""


class CapacityError(Dsv4Error):
    """Not enough memory, context or sessions for what was asked."""


class BackendError(Dsv4Error):
    """The backend cannot run here (no compiled modules, no device)."""
