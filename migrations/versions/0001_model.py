"""The model's tables."""

from alembic import context

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Run the script beside this file."""
    context.config.attributes["run_beside"](__file__)
