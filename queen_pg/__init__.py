"""queen-pg: a message broker with Queen MQ's wire protocol, kept whole in PostgreSQL."""

__version__ = "0.1.0"
