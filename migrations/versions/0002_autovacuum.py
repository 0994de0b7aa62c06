"""When each table is vacuumed."""

from alembic import context

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Run the script beside this file."""
    context.config.attributes["run_beside"](__file__)
