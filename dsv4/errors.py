"""Every error that the user can act on: one line that says what was expected, what was found and what to do."""


def install(*extras: str) -> str:
    """The end of a message about a package that is missing and belongs to one of these extras: what to do."""
    commands = [f"`pip install -e '.[{extra}]'`" for extra in extras]
    return f"{' or '.join(commands)} in a checkout installs what is needed"


class Dsv4Error(Exception):
    """Base class. The command line prints it as one line and exits with status 2."""


class ConfigError(Dsv4Error):
    """config.json, a setting or an environment variable is missing, unknown or contradicts another."""


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
