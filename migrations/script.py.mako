"""${message}."""

from alembic import context

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    """Run the script beside this file."""
    context.config.attributes["run_beside"](__file__)
